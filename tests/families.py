"""Model families that people train, small and unmodified.

They are built from configurations of transformers; the ResNet is like torchvision's. Dropout is off, so that results
can be compared with those of one process.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH = 128, 2, 16
IMAGE_TOKEN, IMAGE_TOKENS = VOCABULARY - 1, 4


def transformers() -> Any:
    return pytest.importorskip("transformers")


def ready(model: nn.Module) -> nn.Module:
    """Bring a model into the state that the first forward of a transformers model leaves.

    That forward installs hooks, which torch.compile cannot trace. Run a batch before torch.compile, or call this
    function where there are no values to run on.
    """
    if hasattr(model, "config"):
        from transformers.utils import output_capturing

        output_capturing.install_all_output_capturing_hooks(model)
    return model


# -- text -------------------------------------------------------------------------------------------------------------


def text(layers: int) -> dict[str, Any]:
    """Return the configuration of a decoder."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
    }


def llama(layers: int = 2) -> nn.Module:
    return transformers().LlamaForCausalLM(transformers().LlamaConfig(**text(layers)))


def gpt2(layers: int = 2) -> nn.Module:
    given = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": layers, "n_head": 4, "n_positions": 64}
    given |= {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    given |= {f"{where}_pdrop": 0.0 for where in ("resid", "embd", "attn")}
    model = transformers().GPT2LMHeadModel(transformers().GPT2Config(**given))
    model.loss_type = "ForCausalLM"  # not implied by the class name; a warning would break the graph
    return model


def qwen3_moe(layers: int = 2, experts: str | None = None) -> nn.Module:
    given = text(layers) | {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers().Qwen3MoeConfig(**given, output_router_logits=True)
    model = transformers().Qwen3MoeForCausalLM(config)
    if experts is not None:
        model.set_experts_implementation(experts)
    return model


def mixtral(layers: int = 2) -> nn.Module:
    config = transformers().MixtralConfig(**text(layers), num_local_experts=4, num_experts_per_tok=2)
    return transformers().MixtralForCausalLM(config)


def mamba(layers: int = 2) -> nn.Module:
    config = transformers().MambaConfig(
        vocab_size=VOCABULARY, hidden_size=64, state_size=8, num_hidden_layers=layers, use_cache=False
    )
    return transformers().MambaForCausalLM(config)


def t5(layers: int = 2) -> nn.Module:
    config = transformers().T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=layers,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers().T5ForConditionalGeneration(config)


def gemma2(layers: int = 2) -> nn.Module:
    """Every other layer sees a window.

    Logits, including those of attention, are capped, which only one implementation does.
    """
    given = text(layers) | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "pad_token_id": 0}
    config = transformers().Gemma2Config(**given, attn_implementation="eager")
    return transformers().Gemma2ForCausalLM(config)


def phi3(layers: int = 2) -> nn.Module:
    """Queries, keys and values are one matrix, and so are the two halves of a gated MLP."""
    config = transformers().Phi3Config(**text(layers), pad_token_id=0, sliding_window=6)
    return transformers().Phi3ForCausalLM(config)


def falcon(layers: int = 2) -> nn.Module:
    """One key and value for all heads; attention and MLP read the same normed input; the head is the embedding."""
    config = transformers().FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers().FalconForCausalLM(config)


def gpt_oss(layers: int = 2) -> nn.Module:
    """Experts with biases, a learned sink per head, and a window in every other layer."""
    given = text(layers) | {"head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    config = transformers().GptOssConfig(**given, rope_parameters=rope, output_router_logits=True)
    return transformers().GptOssForCausalLM(config)


def mamba2(layers: int = 2) -> nn.Module:
    config = transformers().Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_heads=8,
        head_dim=16,
        state_size=8,
        n_groups=2,
        chunk_size=8,
        num_hidden_layers=layers,
        use_cache=False,
    )
    return transformers().Mamba2ForCausalLM(config)


def jamba(layers: int = 2) -> nn.Module:
    """Attention with an MLP alternates with Mamba with experts: layers of two classes in one list."""
    given = text(2 * layers) | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "pad_token_id": 0}
    config = transformers().JambaConfig(**given, attn_layer_period=2, attn_layer_offset=0)
    return transformers().JambaForCausalLM(config)


def bert(layers: int = 2) -> nn.Module:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    given = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
    config = transformers().BertConfig(**given, **none, num_hidden_layers=layers, num_attention_heads=4)
    return transformers().BertForPreTraining(config)


def modernbert(layers: int = 2) -> nn.Module:
    """The first layer has no norm in front of attention and sees all tokens. The others see a window."""
    given = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
    given |= {"num_hidden_layers": layers, "num_attention_heads": 4, "local_attention": 8}
    given |= {f"{which}_token_id": 0 for which in ("pad", "bos", "eos", "cls", "sep")}
    return transformers().ModernBertForMaskedLM(transformers().ModernBertConfig(**given))


def tokens(generator: torch.Generator) -> dict[str, Any]:
    found = torch.randint(0, VOCABULARY // 2, (BATCH, LENGTH), generator=generator)
    return {"input_ids": found, "labels": found}


def alike(generator: torch.Generator) -> dict[str, Any]:
    """All tokens of a sequence are equal, so they go to the same few experts, which differ between ranks."""
    found = torch.randint(0, VOCABULARY // 2, (BATCH, 1), generator=generator).expand(BATCH, LENGTH).contiguous()
    return {"input_ids": found, "labels": found}


def sources_and_targets(generator: torch.Generator) -> dict[str, Any]:
    targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH // 2), generator=generator)
    return tokens(generator) | {"labels": targets}


def masked(generator: torch.Generator) -> dict[str, Any]:
    """Every fourth token must be predicted. The last tokens of the first sequence are padding."""
    found = tokens(generator)
    labels = torch.full_like(found["labels"], -100)
    labels[:, ::4] = found["labels"][:, ::4]
    attention_mask = torch.ones_like(labels)
    attention_mask[0, -3:] = 0
    ids = found["input_ids"].clone()
    ids[:, ::4] = VOCABULARY - 1
    return {"input_ids": ids, "labels": labels, "attention_mask": attention_mask}


def masked_pairs(generator: torch.Generator) -> dict[str, Any]:
    """Masked tokens, with two sentences in each sequence."""
    types = torch.arange(LENGTH).ge(LENGTH // 2).long().expand(BATCH, LENGTH)
    follows = torch.randint(0, 2, (BATCH,), generator=generator)
    return masked(generator) | {"token_type_ids": types, "next_sentence_label": follows}


# -- images -----------------------------------------------------------------------------------------------------------


def vision(layers: int, size: int) -> dict[str, Any]:
    """Return the configuration of an image encoder."""
    return {
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "image_size": size,
        "patch_size": 8,
    }


def vit(layers: int = 2) -> nn.Module:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers().ViTConfig(**vision(layers, 32), num_labels=10, **none)
    return transformers().ViTForImageClassification(config)


class BasicBlock(nn.Module):
    """Torchvision's block: two convolutions and a skip connection."""

    def __init__(self, incoming: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(incoming, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or incoming != width:
            self.downsample = nn.Sequential(nn.Conv2d(incoming, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Torchvision's ResNet, with two stages of blocks."""

    def __init__(self, layers: int, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = nn.Sequential(*(BasicBlock(width, width) for _ in range(layers)))
        self.layer2 = nn.Sequential(
            BasicBlock(width, 2 * width, 2), *(BasicBlock(2 * width, 2 * width) for _ in range(layers - 1))
        )
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet(layers: int = 2) -> nn.Module:
    return ResNet(layers)


def dinov2(layers: int = 2) -> nn.Module:
    """Only pretraining uses its mask token."""
    given = vision(layers, 32)
    del given["intermediate_size"]
    return transformers().Dinov2ForImageClassification(transformers().Dinov2Config(**given, num_labels=10))


def swin(layers: int = 2) -> nn.Module:
    """Two stages of layers, of which every other one shifts its windows."""
    config = transformers().SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[layers, layers],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
        num_labels=10,
    )
    return transformers().SwinForImageClassification(config)


def segformer(layers: int = 2) -> nn.Module:
    """Two stages of layers with convolutions among them, and a head with a BatchNorm."""
    config = transformers().SegformerConfig(
        num_encoder_blocks=2,
        depths=[layers, layers],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=10,
    )
    return transformers().SegformerForSemanticSegmentation(config)


def images(generator: torch.Generator) -> dict[str, Any]:
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (BATCH,), generator=generator)}


def maps(generator: torch.Generator) -> dict[str, Any]:
    """Images with a class for each pixel."""
    labels = torch.randint(0, 10, (BATCH, 32, 32), generator=generator)
    return images(generator) | {"labels": labels}


def pictures(generator: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn(4 * BATCH, 3, 32, 32, generator=generator)}


def spread(logits: Tensor) -> Tensor:
    """A loss for logits without labels."""
    return logits.logsumexp(1).mean() + logits.pow(2).mean()


# -- text and images --------------------------------------------------------------------------------------------------


def llava(layers: int = 2) -> nn.Module:
    """Takes the output of its vision tower's last layer but one: nothing reads the output of the last one."""
    t = transformers()
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**vision(layers, 16), projection_dim=64),
        text_config=t.LlamaConfig(**text(layers)),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=IMAGE_TOKENS,
    )
    return t.LlavaForConditionalGeneration(config)


def frozen_llava(layers: int = 2) -> nn.Module:
    model = llava(layers)
    model.model.vision_tower.requires_grad_(False)
    return model


def qwen2_vl(layers: int = 2) -> nn.Module:
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
    tower = {"depth": layers, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2}
    config = transformers().Qwen2VLConfig(
        text_config=text(layers) | rope,
        vision_config=tower,
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN - 1,
        vision_start_token_id=IMAGE_TOKEN - 2,
        vision_end_token_id=IMAGE_TOKEN - 3,
    )
    return transformers().Qwen2VLForConditionalGeneration(config)


def clip(layers: int = 2) -> nn.Module:
    """Two towers and a temperature, which is a parameter without dimensions."""
    t = transformers()
    words = text(layers) | {"projection_dim": 32}
    words = {name: words[name] for name in words if name not in ("num_key_value_heads", "use_cache")}
    pixels = vision(layers, 16) | {"projection_dim": 32}
    return t.CLIPModel(t.CLIPConfig(text_config=words, vision_config=pixels, projection_dim=32))


def with_image_tokens(batch: dict[str, Any], first: int = 2) -> dict[str, Any]:
    """Replace tokens by those that stand for an image. These have no labels."""
    ids, labels = batch["input_ids"].clone(), batch["labels"].clone()
    ids[:, first : first + IMAGE_TOKENS] = IMAGE_TOKEN
    labels[:, first : first + IMAGE_TOKENS] = -100
    return {"input_ids": ids, "labels": labels}


def text_and_images(generator: torch.Generator) -> dict[str, Any]:
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return with_image_tokens(tokens(generator)) | {"pixel_values": pixels}


def text_and_patches(generator: torch.Generator) -> dict[str, Any]:
    """Inputs as Qwen2-VL takes them: four by four patches of each image, in two frames, become two by two tokens."""
    found = with_image_tokens(tokens(generator))
    return found | {
        "pixel_values": torch.randn(BATCH * 4 * IMAGE_TOKENS, 3 * 2 * 8 * 8, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "mm_token_type_ids": (found["input_ids"] == IMAGE_TOKEN).int(),
    }


def captions(generator: torch.Generator) -> dict[str, Any]:
    """As many images as texts."""
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    ids[:, -1] = 0  # the end token, whose output stands for the text
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator),
        "return_loss": True,
    }


# -- speech -----------------------------------------------------------------------------------------------------------


def whisper(layers: int = 2) -> nn.Module:
    """The positions of its encoder are fixed. The head shares the decoder's embedding."""
    config = transformers().WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=64,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=LENGTH,
        max_target_positions=64,
        decoder_start_token_id=0,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers().WhisperForConditionalGeneration(config)


def speech(generator: torch.Generator) -> dict[str, Any]:
    targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH // 2), generator=generator)
    return {"input_features": torch.randn(BATCH, 8, 2 * LENGTH, generator=generator), "labels": targets}


# -- families ---------------------------------------------------------------------------------------------------------


def _loss(output: Any) -> Tensor:
    return output.loss


@dataclass(frozen=True)
class Family:
    """A model and the data it is trained on.

    Args:
        title: Title in the documentation. make: Builds the model, with ``layers`` layers of each kind. batch: Makes the
        arguments of its forward. loss: Computes the loss from what forward returns. fullgraph: Whether torch.compile
        makes one graph of it. cancelling: Patterns for names of parameters whose gradient is zero except for rounding,
        such as a bias in front of a
            BatchNorm, which cancels it.
    """

    title: str
    make: Callable[..., nn.Module]
    batch: Callable[[torch.Generator], dict[str, Any]]
    loss: Callable[[Any], Tensor] = _loss
    fullgraph: bool = True
    cancelling: tuple[str, ...] = ()

    def cancels(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.cancelling)

    def batch_of(self, seed: int) -> dict[str, Any]:
        return self.batch(torch.Generator().manual_seed(seed))


def _qwen3_moe(experts: str, **given: Any) -> Family:
    make = functools.partial(qwen3_moe, experts=experts)
    return Family(f"Qwen3MoeForCausalLM, `{experts}`", make, **({"batch": tokens} | given))


FAMILIES = {
    "llama": Family("LlamaForCausalLM", llama, tokens),
    "gpt2": Family("GPT2LMHeadModel", gpt2, tokens),
    "qwen3-moe": _qwen3_moe("grouped_mm"),
    "qwen3-moe-batched": _qwen3_moe("batched_mm"),
    "qwen3-moe-loop": _qwen3_moe("eager", batch=alike, fullgraph=False),
    "mixtral": Family("MixtralForCausalLM", mixtral, tokens),
    "t5": Family("T5ForConditionalGeneration", t5, sources_and_targets),
    "vit": Family("ViTForImageClassification", vit, images),
    "mamba": Family("MambaForCausalLM", mamba, tokens),
    "llava": Family("LlavaForConditionalGeneration", llava, text_and_images),
    "llava-text": Family("LlavaForConditionalGeneration, without images", llava, tokens),
    "llava-frozen": Family("LlavaForConditionalGeneration, frozen tower", frozen_llava, text_and_images),
    "qwen2-vl": Family("Qwen2VLForConditionalGeneration", qwen2_vl, text_and_patches, fullgraph=False),
    "resnet": Family("ResNet", resnet, pictures, spread),
    "gemma2": Family("Gemma2ForCausalLM", gemma2, tokens),
    "phi3": Family("Phi3ForCausalLM", phi3, tokens),
    "falcon": Family("FalconForCausalLM", falcon, tokens),
    "gpt-oss": Family("GptOssForCausalLM", gpt_oss, tokens),
    "mamba2": Family("Mamba2ForCausalLM", mamba2, tokens),
    "jamba": Family("JambaForCausalLM", jamba, tokens),
    "bert": Family("BertForPreTraining", bert, masked_pairs),
    "modernbert": Family("ModernBertForMaskedLM", modernbert, masked),
    "whisper": Family("WhisperForConditionalGeneration", whisper, speech),
    "clip": Family("CLIPModel", clip, captions),
    "dinov2": Family("Dinov2ForImageClassification", dinov2, images),
    "swin": Family("SwinForImageClassification", swin, images),
    "segformer": Family(
        "SegformerForSemanticSegmentation", segformer, maps, cancelling=("decode_head.linear_projections.*.bias",)
    ),
}
