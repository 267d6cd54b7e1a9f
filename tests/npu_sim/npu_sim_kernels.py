"""Kernels for the simulated NPU: `install` is called by `import torch`, as a registered backend of it.

A device's memory is memory of this process, so aten's CPU kernels can compute on it: each operation that has
one, and only looks at elements, is registered for the NPU as "wait for the stream, then run the CPU kernel on
the same bytes". All the rest stays torch-npu's own: allocation, views, streams and events, copies between host
and device, pinned memory, HCCL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

OWN = {
    *("empty", "empty_strided", "resize_", "set_", "record_stream", "_to_copy", "lift_fresh"),
    *("is_pinned", "pin_memory", "_pin_memory", "_local_scalar_dense", "_copy_from", "_copy_from_and_resize"),
    *("view", "as_strided", "reshape", "_reshape_alias", "_unsafe_view", "contiguous"),
}
"""Operations that torch-npu carries out itself (besides all those whose results are views)."""

Kernel = Callable[..., Any]
_held: list[Any] = []
"""Registrations last as long as this does."""


def install() -> None:
    """Register the kernels, once."""
    if _held:
        return
    import torch_npu  # noqa: F401  # the order in which torch loads backends is not ours

    library = torch.library.Library("aten", "IMPL")
    _held.append(library)
    for name in torch._C._dispatch_get_all_op_names():
        operation = _operation(name)
        if operation is not None:
            library.impl(name.removeprefix("aten::"), _on_host(operation), "PrivateUse1", allow_override=True)
    crossing = torch.library.get_kernel("aten::copy_", "PrivateUse1")
    library.impl("copy_", _copy(crossing), "PrivateUse1", with_keyset=True, allow_override=True)
    library.impl("matmul_backward", _matmul_backward, "PrivateUse1", allow_override=True)
    extras = torch.library.Library("npu", "IMPL")
    # A format is how a device lays out memory; there is only one here.
    extras.impl("npu_format_cast", lambda value, _format, **_: value, "PrivateUse1", allow_override=True)
    _held.extend((crossing, extras))


def _operation(name: str) -> Any:
    """The operation of this name, if a CPU kernel shall carry it out."""
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if space != "aten" or base in OWN or base == "copy_":
        return None
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("CPU", "PrivateUse1")):
        return None
    try:
        found = getattr(getattr(torch.ops.aten, base), overload or "default")
    except AttributeError:
        return None  # not reachable from Python, or of another build
    arguments = found._schema.arguments
    makes_view = any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)
    return None if makes_view else found


def _on_host(operation: Any) -> Kernel:
    schema = operation._schema
    written = [
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    count = len(schema.returns)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        device = _device(args, kwargs)
        torch.npu.current_stream(device).synchronize()
        result = operation(*_each(_to_host, args), **{name: _each(_to_host, value) for name, value in kwargs.items()})
        if written:  # the CPU kernel wrote into the same bytes
            given = [args[i] if i < len(args) else kwargs.get(name) for i, name in written][:count]
            return None if not given or not count else given[0] if count == 1 else tuple(given)
        return _each(lambda value: _to_device(value, device), result)

    return kernel


def _copy(crossing: Any) -> Kernel:
    """`copy_`: within a device on the host; between host and device torch-npu's own, for what is like on both sides."""

    def kernel(keys: Any, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if to.device == source.device:
            torch.npu.current_stream(to.device).synchronize()
            _to_host(to).copy_(_to_host(source))
        elif to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous() and to.shape == source.shape:
            crossing.call_boxed(keys, to, source, non_blocking)
        else:
            like = torch.empty(to.shape, dtype=to.dtype, device=source.device)
            like.copy_(source)
            if to.is_contiguous():
                to.copy_(like)
            else:
                to.copy_(torch.empty(to.shape, dtype=to.dtype, device=to.device).copy_(like))
        return to

    return kernel


def _matmul_backward(
    grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor, _mask: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch-npu has an operation of its own where aten has none: for matrices, and a batch of them on the left."""
    if right.dim() != 2 or left.dim() < 2:
        raise NotImplementedError(f"npu_sim: matmul_backward of {left.dim()} and {right.dim()} dimensions")
    rows, grads = left.reshape(-1, left.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return grad @ right.t(), rows.t() @ grads


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `change` applied to it, or to what it lists."""
    if isinstance(value, (list, tuple)):
        return type(value)([_each(change, one) for one in value])
    return change(value)


def _device(args: Any, kwargs: Any) -> torch.device:
    """Where an operation takes place: at its tensors, at its ``device=``, or at the current device."""
    for value in (*args, *kwargs.values()):
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, torch.Tensor) and first.device.type == "npu":
            return first.device
    asked = kwargs.get("device")
    if isinstance(asked, torch.device) and asked.index is not None:
        return asked
    return torch.device("npu", torch.npu.current_device())


def _to_host(value: Any) -> Any:
    """A tensor on the host over the same bytes; the host for the device."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "npu" else value
    if not isinstance(value, torch.Tensor) or value.device.type != "npu":
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=value.dtype).set_(whole, value.storage_offset(), value.shape, value.stride())
    made = made.conj() if value.is_conj() else made
    return torch._neg_view(made) if value.is_neg() else made


def _to_device(value: Any, device: torch.device) -> Any:
    """A tensor on the device with the elements and strides of a result on the host."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    _to_host(made).copy_(value)
    return made
