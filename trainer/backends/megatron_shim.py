"""megatron-core on CPUs: while it runs, what it takes for a GPU is the CPU. On a GPU nothing is changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
STAND_INS: dict[str, Callable[..., Any]] = {"current_device": lambda: CPU, "synchronize": lambda *_: None}
"for functions of torch.cuda"


class _Literals(TorchFunctionMode):
    """device="cuda" is the CPU, `.cuda()` the tensor itself, and its type says cuda: optimizers compare with that."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = CPU
        if function is Tensor.cuda:
            return args[0]
        if function is Tensor.type and len(args) == 1 and not named:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        return function(*args, **named)


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """While the block lasts, megatron-core computes on `device`. It warns of what PyTorch will rename one day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")  # a slice of float32
        with _stand_ins() if device.type == "cpu" else nullcontext():
            yield


@contextmanager
def _stand_ins() -> Iterator[None]:
    before = {name: getattr(torch.cuda, name) for name in STAND_INS}
    try:
        for name, stand_in in STAND_INS.items():
            setattr(torch.cuda, name, stand_in)
        with _Literals():
            yield
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)
