"""Model families that people train, small and unmodified: from configurations of transformers; and a ResNet like torchvision's.

Dropout is off, so that one process can be compared with.
"""

from __future__ import annotations

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
    """As the first forward of a transformers model leaves it: it installs hooks, which torch.compile cannot trace. To be done
    by a batch before torch.compile, or like this where there are no values to run on."""
    if hasattr(model, "config"):
        from transformers.utils import output_capturing

        output_capturing.install_all_output_capturing_hooks(model)
    return model


# -- text -------------------------------------------------------------------------------------------------------------


def text(layers: int) -> dict[str, Any]:
    """Configuration of a decoder."""
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
    model.loss_type = "ForCausalLM"  # the name of the class does not say it, and a warning about that breaks the graph
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


def tokens(generator: torch.Generator) -> dict[str, Any]:
    found = torch.randint(0, VOCABULARY // 2, (BATCH, LENGTH), generator=generator)
    return {"input_ids": found, "labels": found}


def alike(generator: torch.Generator) -> dict[str, Any]:
    """All tokens of a sequence are the same: they go to the same few experts, others on each rank."""
    found = torch.randint(0, VOCABULARY // 2, (BATCH, 1), generator=generator).expand(BATCH, LENGTH).contiguous()
    return {"input_ids": found, "labels": found}


def sources_and_targets(generator: torch.Generator) -> dict[str, Any]:
    targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH // 2), generator=generator)
    return tokens(generator) | {"labels": targets}


# -- images -----------------------------------------------------------------------------------------------------------


def vision(layers: int, size: int) -> dict[str, Any]:
    """Configuration of an encoder of images."""
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
    """Torchvision's: two convolutions, and a way past them."""

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
    """Torchvision's, with two stages of blocks."""

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


def images(generator: torch.Generator) -> dict[str, Any]:
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (BATCH,), generator=generator)}


def pictures(generator: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn(4 * BATCH, 3, 32, 32, generator=generator)}


def spread(logits: Tensor) -> Tensor:
    """A loss for logits without labels."""
    return logits.logsumexp(1).mean() + logits.pow(2).mean()


# -- text and images --------------------------------------------------------------------------------------------------


def llava(layers: int = 2) -> nn.Module:
    """Takes the output of its vision tower's last layer but one: nothing reads what the last one computes."""
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


def with_image_tokens(batch: dict[str, Any], first: int = 2) -> dict[str, Any]:
    """Tokens in the place of which an image comes; nothing is learnt from them."""
    ids, labels = batch["input_ids"].clone(), batch["labels"].clone()
    ids[:, first : first + IMAGE_TOKENS] = IMAGE_TOKEN
    labels[:, first : first + IMAGE_TOKENS] = -100
    return {"input_ids": ids, "labels": labels}


def text_and_images(generator: torch.Generator) -> dict[str, Any]:
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return with_image_tokens(tokens(generator)) | {"pixel_values": pixels}


def text_and_patches(generator: torch.Generator) -> dict[str, Any]:
    """As Qwen2-VL has them: four by four patches of each image, in two frames, become two by two tokens."""
    found = with_image_tokens(tokens(generator))
    return found | {
        "pixel_values": torch.randn(BATCH * 4 * IMAGE_TOKENS, 3 * 2 * 8 * 8, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "mm_token_type_ids": (found["input_ids"] == IMAGE_TOKEN).int(),
    }


# -- families ---------------------------------------------------------------------------------------------------------


def _loss(output: Any) -> Tensor:
    return output.loss


@dataclass(frozen=True)
class Family:
    """A model and what it is trained on.

    Args:
        title: in documentation.
        make: the model, with ``layers=`` of each kind.
        batch: arguments of its forward.
        loss: of what forward returns.
        fullgraph: whether torch.compile makes one graph of it.
    """

    title: str
    make: Callable[..., nn.Module]
    batch: Callable[[torch.Generator], dict[str, Any]]
    loss: Callable[[Any], Tensor] = _loss
    fullgraph: bool = True

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
}
