"""What a unit keeps in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from ...lanes.rest import ON_DEVICE, Rest


@dataclass(frozen=True)
class OptimizerOffloadPolicy:
    """Keeps main weights, their reduced gradients and the optimizer's state in host memory, and what is gathered on the
    device.

    As DeepSpeed's ``offload_optimizer``. Only reduced gradients are copied to the host, and changed weights back, once
    per optimizer step. Beside FSDP2's ``CPUOffloadPolicy``, which copies the shard to the device before each gather,
    this takes the memory of a shard in the dtype that is gathered.

    Args:
        pin_memory: Whether the memory is pinned, if the device is a GPU.
    """

    pin_memory: bool = True


AnyOffloadPolicy: TypeAlias = OffloadPolicy | OptimizerOffloadPolicy


def rest_of(policy: Any, argument: str) -> Rest:
    """Return where buckets rest with a policy.

    Args:
        policy: An ``OffloadPolicy`` of FSDP2, an :class:`OptimizerOffloadPolicy`, or None.
        argument: What it was given as, for messages.

    Raises:
        TypeError: It is something else.
    """
    if policy is None or type(policy) is OffloadPolicy:
        return ON_DEVICE
    if type(policy) not in (CPUOffloadPolicy, OptimizerOffloadPolicy):
        raise TypeError(
            f"{argument} takes CPUOffloadPolicy or OffloadPolicy of torch.distributed.fsdp, OptimizerOffloadPolicy of "
            f"mfsdp_compile, or None, got {policy!r:.200}"
        )
    from .stages import HostMemory

    return HostMemory(policy.pin_memory, optimizer_only=isinstance(policy, OptimizerOffloadPolicy))
