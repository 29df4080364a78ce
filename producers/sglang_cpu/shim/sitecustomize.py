"""Every Python process of the server loads this, and nothing here is done where there is CUDA.

torchvision from PyPI brings operators for CUDA only; without CUDA its import fails for want of two schemas, which are
defined here first. Adapters (LoRA) ask for pinned memory, which torch without CUDA refuses: they get memory as it is.
"""

import functools
import importlib.abc
import sys


class _Before(importlib.abc.MetaPathFinder):
    """What is done once, before a package is imported."""

    library = None
    unpinned = False

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and _Before.library is None:
            _schemas()
        if fullname == "sglang.srt.lora" and not _Before.unpinned:
            _unpinned()
        return


def _schemas():
    import torch

    if not torch.version.cuda:
        _Before.library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _Before.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _unpinned():
    import torch

    _Before.unpinned = True
    if not torch.version.cuda:
        torch.Tensor.pin_memory = lambda self, *_: self
        for name in ("tensor", "empty", "zeros", "arange"):
            setattr(torch, name, _without_pin(getattr(torch, name)))


def _without_pin(make):
    @functools.wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


sys.meta_path.insert(0, _Before())
