"""In place of SGLang's CPU kernels, which are not on PyPI: the one function that dense models on the torch path call.
Any other says its name when it is called."""

__version__ = "0.0.0+shim"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Writes each request's new cache places, which lie one request after the other, into its row."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        places = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = places.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not part of the CPU stand-in")

    return missing
