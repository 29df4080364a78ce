"""Every Python process of the server loads this. torchvision from PyPI brings operators for CUDA only; without CUDA its
import fails for want of two schemas, which are defined here first. Where there is CUDA nothing is done."""

import importlib.abc
import sys


class _Schemas(importlib.abc.MetaPathFinder):
    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and _Schemas.library is None:
            import torch

            if not torch.version.cuda:
                _Schemas.library = torch.library.Library("torchvision", "DEF")
                for name in ("nms", "qnms"):
                    _Schemas.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return


sys.meta_path.insert(0, _Schemas())
