"""minihisparse: a minimal, exact, readable reference engine for HiSparse (arXiv 2608.07009).

The whole KV history of a request lives in host memory; the device keeps, per request and layer, a
small cache of records. Each decode step, in each layer, a sparse selector names the positions to
read and *Resolve* makes exactly those records resident. Only the place of KV changes: outputs equal
those of the same sparse attention with all KV on the device, bit for bit.

The words used everywhere (nothing else is called by these names):

    position    a token's logical place in its request, 0-based
    record      the KV bytes of one position in one layer: K and V of all KV heads, side by side
    slot        a record's place in the GPU cache of its request, 0..B
    host row    a record's place in the host pool
    request row a request's index in every per-request table (req_pool_indices)

    R   requests in the batch          T   new tokens of a prompt (prefill)
    L   layers                         S   seq_len: tokens so far, the newest included
    Hq  query heads, Hkv KV heads      D   head_dim
    W   record width in elements = 2 * Hkv * D
    K   top_k: positions selected      B   device_buffer_size: slots per request and layer
    P   pages of a request             V   vocabulary

-1 means empty or padding, in every table, and is guarded at every read.
"""

import os as _os

__version__ = "0.1.0"

# In a checkout that is not installed, `minihisparse.kernels` and `minihisparse.weights_scripts` lie
# one folder up. Neither has an __init__.py: with the checkout on sys.path, `import kernels` must
# not find a package here that other libraries take for the one they know by that name.
_here = _os.path.dirname(_os.path.abspath(__file__))
if not _os.path.isdir(_os.path.join(_here, "kernels")):
    _root = _os.path.dirname(_here)
    if _os.path.isdir(_os.path.join(_root, "kernels")):
        __path__.append(_root)
