"""Models of transformers from the meta device: initialized, loaded from folders, and generating."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import raises_everywhere
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.checkpoint import CheckpointError
from mfsdp_compile.convert.safetensors_files import SafetensorsReader
from mfsdp_compile.diagnostics.measure import allocated, collectives
from mfsdp_compile.integrations import huggingface_init

transformers = pytest.importorskip("transformers", minversion="5")

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}


def llama(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(TEXT | changes)))


def gpt2() -> nn.Module:
    """Parents initialize parameters of their children a second time."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4))


def mixtral(experts: int = 4, **changes: Any) -> nn.Module:
    """A folder has one tensor per expert, the model one tensor for all experts."""
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**(TEXT | changes), num_local_experts=experts))


def t5() -> nn.Module:
    """Four names for one embedding."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION))


def llava() -> nn.Module:
    """Two models in one, each initialized by its own method."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION), text_config=transformers.LlamaConfig(**TEXT)
    )
    return transformers.LlavaForConditionalGeneration(config)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "mixtral": mixtral,
    "t5": t5,
    "mamba": mamba,
    "vit": vit,
    "llava": llava,
}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def shard(model: nn.Module, initializer: Any, **options: Any) -> Any:
    return fully_shard_model(
        model, fsdp_unit_modules="auto", init_model_with_meta_device=True, init_fn=initializer, **options
    )


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield one folder for all ranks. Transformers saves on the first rank."""
    with tempfile.TemporaryDirectory() as mine:
        everyones = [mine]
        dist.broadcast_object_list(everyones)
        yield Path(everyones[0])
        dist.barrier()


def assert_rows_of(sharded: Any, expected: nn.Module, buffers_too: bool = True) -> None:
    """Assert that this rank's rows of every parameter, and all buffers, are those of a whole model."""
    wholes = dict(expected.named_parameters())
    for bucket in sharded.sharded.buckets:
        for locations, split, param in zip(bucket.locations, bucket.splits, bucket.params, strict=True):
            rows = split.rows(bucket.topology.shard)
            whole = wholes.pop(locations[0].name)
            assert torch.equal(param.to_local(), whole[rows.start : rows.stop]), locations[0].name
    assert not wholes
    if not buffers_too:
        return
    buffers = dict(expected.named_buffers())
    assert {name for name, _ in sharded.module.named_buffers()} == buffers.keys()
    for name, buffer in sharded.module.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.slow
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("name", MODELS)
def test_models_are_initialized_as_transformers_does(name: str) -> None:
    alone = on_meta(MODELS[name]).to_empty(device="cpu")
    torch.manual_seed(0)
    alone.init_weights()
    following = torch.rand(1)
    torch.manual_seed(0)
    model = shard(on_meta(MODELS[name]), huggingface_init.Initialization())
    assert torch.equal(torch.rand(1), following)
    assert_rows_of(model, alone)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("name", MODELS)
def test_folders_are_loaded_into_shards(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone = MODELS[name]()
    alone.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_rows_of(shard(on_meta(MODELS[name]), huggingface_init.Pretrained(tmp_path)), alone)


@pytest.mark.usefixtures("fake_world")
def test_a_rank_reads_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads only its own experts, if the folder has one tensor for each, and its rows of other parameters."""
    bytes_read = 0

    def counted(method: str) -> None:
        original = getattr(SafetensorsReader, method)

        def read(*args: Any) -> Tensor:
            nonlocal bytes_read
            found = original(*args)
            bytes_read += found.nbytes
            return found

        monkeypatch.setattr(SafetensorsReader, method, read)

    counted("tensor")
    counted("part")
    mixtral(experts=16).save_pretrained(tmp_path)
    model = shard(on_meta(lambda: mixtral(experts=16)), huggingface_init.Pretrained(tmp_path))
    assert bytes_read == sum(param.to_local().nbytes for param in model.parameters())


@pytest.mark.usefixtures("fake_world")
def test_no_parameter_is_ever_whole(tmp_path: Path) -> None:
    """Initialization and loading take little more memory than the shards and one parameter.

    The file that safetensors maps counts as allocated, although it is not.
    """

    def large() -> nn.Module:
        return llama(hidden_size=512, num_hidden_layers=4, intermediate_size=1376, vocab_size=512)

    large().save_pretrained(tmp_path)
    file = (tmp_path / "model.safetensors").stat().st_size
    for initializer, mapped in ((huggingface_init.Initialization(), 0), (huggingface_init.Pretrained(tmp_path), file)):
        model, found = on_meta(large), []
        peak, _ = allocated(lambda model=model, i=initializer, found=found: found.append(shard(model, i)))  # type: ignore[misc]
        shards = sum(bucket.plan.shard_bytes for bucket in found[0].sharded.buckets)
        parameter = 512 * 1376 * 4
        assert peak < shards + 1.25 * parameter + mapped, (peak, shards, parameter)


@pytest.mark.usefixtures("fake_world")
def test_values_are_rounded_once(tmp_path: Path) -> None:
    """The float32 shards of a bfloat16 model get the values of the folder, without rounding."""
    torch.manual_seed(0)
    alone = llama()
    alone.save_pretrained(tmp_path)
    loaded = shard(on_meta(lambda: llama().to(torch.bfloat16)), huggingface_init.Pretrained(tmp_path))
    assert all(param.dtype == torch.float32 for param in loaded.parameters())
    assert_rows_of(loaded, alone, buffers_too=False)
    policy = MixedPrecisionPolicy(main_params_dtype=None)
    loaded = shard(
        on_meta(lambda: llama().to(torch.bfloat16)),
        huggingface_init.Pretrained(tmp_path),
        mixed_precision_policy=policy,
    )
    assert_rows_of(loaded, alone.to(torch.bfloat16))


@pytest.mark.usefixtures("fake_world")
def test_parts_that_are_missing_are_initialized_when_that_is_meant(tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone = llama()
    alone.save_pretrained(tmp_path)

    def classifier() -> nn.Module:
        return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**TEXT, num_labels=3))

    pretrained = huggingface_init.Pretrained(tmp_path, allow_missing="score.*", allow_unexpected=["lm_head.*"])
    torch.manual_seed(5)
    model = shard(on_meta(classifier), pretrained)
    torch.manual_seed(5)
    expected = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    with torch.no_grad():
        torch.manual_seed(5)
        expected.score.weight.normal_(0, expected.config.initializer_range)
    assert_rows_of(model, expected)


@pytest.mark.usefixtures("fake_world")
def test_other_modules_get_the_tensors_of_their_names(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    alone = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    for tensor in alone.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1)
    save_file(alone.state_dict(), tmp_path / "weights.safetensors")
    model = fully_shard_model(
        on_meta(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))),
        fsdp_unit_modules=[nn.Linear],
        init_model_with_meta_device=True,
        init_fn=huggingface_init.Pretrained(tmp_path / "weights.safetensors"),
    )
    assert_rows_of(model, alone)


@on_ranks(2)
def test_mistakes_are_explained() -> None:
    with shared_folder() as path:
        torch.manual_seed(0)
        llama().save_pretrained(path / "llama")
        mixtral(intermediate_size=40).save_pretrained(path / "mixtral")
        dist.barrier()

        def refused(error: type[Exception], *fragments: str, make: Any = llama, init_fn: Any) -> None:
            with raises_everywhere(error, *fragments):
                shard(on_meta(make), init_fn)

        refused(
            TypeError,
            "this Linear contains none",
            make=lambda: nn.Linear(2, 2),
            init_fn=huggingface_init.Initialization(),
        )
        refused(CheckpointError, "nowhere", init_fn=huggingface_init.Pretrained(path / "nowhere"))
        refused(
            CheckpointError,
            "does not fit the model, a LlamaForCausalLM",
            "missing: model.layers.2.mlp.up_proj.weight (48, 32)",
            "allow_missing",
            make=lambda: llama(num_hidden_layers=3),
            init_fn=huggingface_init.Pretrained(path / "llama"),
        )
        refused(
            CheckpointError,
            "unexpected: model.layers.1.mlp.up_proj.weight",
            make=lambda: llama(num_hidden_layers=1),
            init_fn=huggingface_init.Pretrained(path / "llama"),
        )
        refused(
            CheckpointError,
            "another shape: lm_head.weight is (97, 32), the folder has (96, 32)",
            make=lambda: llama(vocab_size=97),
            init_fn=huggingface_init.Pretrained(path / "llama"),
        )
        refused(
            CheckpointError,
            "another shape: model.layers.0.mlp.experts.down_proj is (4, 32, 48), the folder has (4, 32, 40)",
            make=mixtral,
            init_fn=huggingface_init.Pretrained(path / "mixtral"),
        )
        # One rank cannot read the disk.
        refused(
            CheckpointError if dist.get_rank() == 1 else RuntimeError,
            "elsewhere",
            init_fn=huggingface_init.Pretrained(path / ("llama" if dist.get_rank() == 0 else "elsewhere")),
        )


@on_ranks(2)
def test_embeddings_are_resized_before_sharding() -> None:
    torch.manual_seed(0)
    sharded = llama()
    fully_shard_model(sharded, fsdp_unit_modules=[type(sharded.model.layers[0])])
    tokens = torch.arange(8)[None]
    before = sharded(tokens).logits
    with raises_everywhere(RuntimeError, "resize_token_embeddings", "before the model is sharded", "(97, 32)"):
        sharded.resize_token_embeddings(97)
    assert torch.equal(sharded(tokens).logits, before)


@on_ranks(1, 3)
def test_generation_gives_the_tokens_of_the_whole_model() -> None:
    """A model loaded into shards generates the tokens of the whole model.

    Parameters are gathered for each token, kept, or kept in part. Ranks generate from different prompts, to different
    lengths.
    """
    with shared_folder() as scratch:
        torch.manual_seed(0)
        alone = llama(num_hidden_layers=3, initializer_range=0.5).eval()
        alone.save_pretrained(scratch)
        dist.barrier()
        model = shard(
            on_meta(lambda: llama(num_hidden_layers=3, initializer_range=0.5)), huggingface_init.Pretrained(scratch)
        ).eval()
    prompt = torch.randint(0, 96, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12 - 3 * dist.get_rank(), "pad_token_id": 0}
    expected = alone.generate(prompt, **settings)
    assert len(expected[0]) == 5 + settings["max_new_tokens"]
    found: list[Tensor] = []

    def generate() -> None:
        found.append(model.generate(prompt, **settings))

    counts = collectives(generate)
    world = dist.get_world_size()
    gathers = counts["all_gather_into_tensor"]
    assert gathers % 12 == 0
    # Per token that some rank still generates: three layers and the root's parts.
    assert gathers // 12 >= 4 if world > 1 else gathers == 0
    with model.gathered():
        assert collectives(generate)["all_gather_into_tensor"] == 0
    with model.gathered(20_000):
        fewer = collectives(generate)["all_gather_into_tensor"]
    assert 0 < fewer < gathers if world > 1 else fewer == 0
    generate()
    assert len(found) == 4
    assert all(torch.equal(tokens, expected) for tokens in found), world
