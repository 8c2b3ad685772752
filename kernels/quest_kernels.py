"""The kernels of Quest's page selection; what they are for, and in which order, is in `quest.py`.

    add_keys       a block per request, a thread per 16 bytes of a key
    score_pages    blocks: requests x KV heads x some of the tiles of pages
    select_pages   blocks: requests x a share of the request's pages

score_pages is bound by memory. A warp reads one KV head of several pages: LANES lanes side by side
read a page's maxima and minima, 16 bytes each, and do so for PAGES pages before they wait. These
are unpacked once for all query heads of the group, whose numbers come out of shared memory. A
tile's scores meet in shared memory too: there their maximum and sum of exponentials are made.

Reads: score_pages 2 * Hkv * D numbers per page; select_pages 4 bytes per page and query head, and 8
per tile and query head in each block. Writes: as much as select_pages reads. Scores are on a log2
scale, for exp2, until they are exponentials.

They deliberately do not know whose pages these are, nor how many blocks share the work.
"""

from __future__ import annotations

from functools import cache

from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    Kernel,
    bits_of_float,
    cuda,
    device_function,
    exp2,
    float32,
    int32,
    int64,
    kernel,
    ld16,
    st4,
    st16,
    uint32,
)
from minihisparse.kernels.numbers import NUMBERS_PER_WORD, number_functions
from minihisparse.kernels.top_k_of_row import ALL_LANES, top_k_of_tiles_function

INFINITY = float("inf")
LOG2_E = 1.4426950408889634
SHARED_BYTES = 48 * 1024  # that every kernel may have without asking
KEY_THREADS = 64
SCORE_THREADS = 128


@device_function
def max_of_lanes(value, lanes):
    """Over groups of neighbouring lanes, whose number is a power of two; each lane gets it."""
    step = lanes >> 1
    while step > 0:
        value = max(value, cuda.shfl_xor_sync(ALL_LANES, value, step))
        step >>= 1
    return value


@device_function
def sum_of_lanes(value, lanes):
    step = lanes >> 1
    while step > 0:
        value += cuda.shfl_xor_sync(ALL_LANES, value, step)
        step >>= 1
    return value


@cache
def key_kernel(*, dtype: str, num_kv_heads: int, head_dim: int, page_size: int) -> Kernel:
    unpack, pack = number_functions(dtype)
    PAGE_SIZE = page_size
    HEAD_BYTES = head_dim * 4 // NUMBERS_PER_WORD[dtype]
    PAGE_BYTES = num_kv_heads * 2 * HEAD_BYTES
    PIECES_PER_HEAD = HEAD_BYTES // 16
    PIECES = num_kv_heads * PIECES_PER_HEAD

    @device_function
    def larger(old, new):
        """Of two floats; a NaN is larger, as in torch.maximum."""
        return old if old >= new or old != old else new

    @device_function
    def smaller(old, new):
        return old if old <= new or old != old else new

    @device_function
    def larger_of_words(old, new):
        old_low, old_high = unpack(old)
        low, high = unpack(new)
        return pack(larger(old_low, low), larger(old_high, high))

    @device_function
    def smaller_of_words(old, new):
        old_low, old_high = unpack(old)
        low, high = unpack(new)
        return pack(smaller(old_low, low), smaller(old_high, high))

    @kernel(max_threads=KEY_THREADS)
    def add_keys(
        bounds: DEVICE_ADDRESS,  # [pages, Hkv, 2, D] the page of each newest key is changed
        first_page: int64[::1],  # [request rows] read
        k: DEVICE_ADDRESS,  # [R, Hkv, D] read
        k_row_bytes: int64,  # from row to row
        seq_lens: int32[::1],  # [R] read
        req_pool_indices: int64[::1],  # [R] read
        num_real_reqs: int32[::1],  # [1] read
    ):
        tid = cuda.threadIdx.x & 1023
        request = int64(cuda.blockIdx.x)
        row, position = req_pool_indices[request], int64(seq_lens[request]) - 1
        if request >= num_real_reqs[0] or position < 0:
            return
        page_of_request = int64(uint32(position) // uint32(PAGE_SIZE))
        page = first_page[row] + page_of_request
        starts_page = position == page_of_request * PAGE_SIZE
        piece = tid
        while piece < PIECES:
            a, b, c, d = ld16(k + request * k_row_bytes + piece * 16)
            max_a, max_b, max_c, max_d = a, b, c, d
            min_a, min_b, min_c, min_d = a, b, c, d
            # The maxima of a head lie where its piece says, the minima behind them.
            head = int64(uint32(piece) // uint32(PIECES_PER_HEAD))
            maxima = bounds + page * PAGE_BYTES + head * HEAD_BYTES + piece * 16
            minima = maxima + HEAD_BYTES
            if not starts_page:
                old_a, old_b, old_c, old_d = ld16(maxima)
                max_a, max_b = larger_of_words(old_a, a), larger_of_words(old_b, b)
                max_c, max_d = larger_of_words(old_c, c), larger_of_words(old_d, d)
                old_a, old_b, old_c, old_d = ld16(minima)
                min_a, min_b = smaller_of_words(old_a, a), smaller_of_words(old_b, b)
                min_c, min_d = smaller_of_words(old_c, c), smaller_of_words(old_d, d)
            st16(maxima, max_a, max_b, max_c, max_d)
            st16(minima, min_a, min_b, min_c, min_d)
            piece += KEY_THREADS

    return add_keys


@cache
def score_kernel(
    *,
    dtype: str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    tile_pages: int,
) -> Kernel:
    """A warp reads one KV head of several pages, LANES lanes each page, and all loads at once."""
    unpack, _ = number_functions(dtype)
    KV_HEADS, GROUP = num_kv_heads, num_q_heads // num_kv_heads
    PAGE_SIZE, TILE = page_size, tile_pages
    PER_WORD = NUMBERS_PER_WORD[dtype]
    PER_PIECE = 4 * PER_WORD  # numbers in 16 bytes
    QUADS = PER_WORD  # of numbers, in 16 bytes
    PIECES = head_dim // PER_PIECE
    HEAD_BYTES = PIECES * 16
    PAGE_BYTES = num_kv_heads * 2 * HEAD_BYTES
    LANES = min(32, max(8, 1 << (PIECES - 1).bit_length()))
    ROUNDS = -(-PIECES // LANES)  # pieces per lane
    SLOTS = LANES * ROUNDS  # for pieces: those without one have zeros for a query
    PAGES = {1: 4, 2: 2}.get(ROUNDS, 1)  # per lane
    SIDE = 32 // LANES  # pages side by side in a warp
    WARPS = SCORE_THREADS // 32
    STEP_PAGES = WARPS * PAGES * SIDE
    STEPS = TILE // STEP_PAGES
    TILES_OF_32 = TILE // 32
    SIGNED = GROUP * 2 * SLOTS * PER_PIECE
    TILE_SCORES = GROUP * TILE
    WORDS, NUMBERS = PAGES * ROUNDS * 4, PAGES * ROUNDS * PER_PIECE
    SCALE = head_dim**-0.5 * LOG2_E
    if 4 * (SIGNED + TILE_SCORES) > SHARED_BYTES:
        raise ValueError(
            f"num_q_heads={num_q_heads}, num_kv_heads={num_kv_heads}, head_dim={head_dim}: the "
            f"query heads of a KV head need {4 * (SIGNED + TILE_SCORES)} bytes of shared memory, "
            f"a block has {SHARED_BYTES}"
        )

    @device_function
    def unpack_all(words, numbers):
        for w in range(len(words)):
            low, high = unpack(words[w])
            numbers[w * PER_WORD] = low
            if PER_WORD == 2:
                numbers[w * PER_WORD + 1] = high

    @device_function
    def sum_one_of(a, b, lane, bit):
        """Of two lanes that differ in a bit, the lower one gets the sum of a, the other of b."""
        is_upper = lane & bit
        mine, other = (b, a) if is_upper else (a, b)
        return mine + cuda.shfl_xor_sync(ALL_LANES, other, bit)

    @kernel(max_threads=SCORE_THREADS)
    def score_pages(
        bounds: DEVICE_ADDRESS,  # [pages, Hkv, 2, D] read
        first_page: int64[::1],  # [request rows] read
        q: DEVICE_ADDRESS,  # [R, Hq, D] read
        q_row_bytes: int64,  # from row to row
        seq_lens: int32[::1],  # [R] read
        req_pool_indices: int64[::1],  # [R] read
        num_real_reqs: int32[::1],  # [1] read
        head_scores: float32[:, :, ::1],  # [>= R, Hq, tiles * TILE] written, -inf behind the pages
        tile_max: float32[:, :, ::1],  # [>= R, Hq, tiles] written
        tile_sum: float32[:, :, ::1],  # [>= R, Hq, tiles] written, of exp2(score - tile_max)
        blocks_per_head: int64,
    ):
        # The query's positive numbers and its negative ones; each quad of all slots is together.
        signed = cuda.shared.array(SIGNED, float32, 16)
        tile_scores = cuda.shared.array(TILE_SCORES, float32)
        max_words = cuda.local.array(WORDS, uint32)
        min_words = cuda.local.array(WORDS, uint32)
        maxima = cuda.local.array(NUMBERS, float32)
        minima = cuda.local.array(NUMBERS, float32)
        numbers = cuda.local.array(PER_PIECE, float32)
        words = cuda.local.array(4, uint32)
        sums = cuda.local.array(4, float32)
        tid = cuda.threadIdx.x & 1023
        lane, warp = tid & 31, tid >> 5
        sub, side = lane & (LANES - 1), lane // LANES

        block = uint32(cuda.blockIdx.x)
        head = int64(block % uint32(KV_HEADS))
        block = uint32(block // uint32(KV_HEADS))
        request = int64(block // uint32(blocks_per_head))
        tile = int64(block) - request * blocks_per_head
        row, seq_len = req_pool_indices[request], int64(seq_lens[request])
        if request >= num_real_reqs[0] or seq_len < 1:
            return
        num_pages = int64(uint32(seq_len + PAGE_SIZE - 1) // uint32(PAGE_SIZE))
        if tile * TILE >= num_pages:
            return
        head_at = bounds + first_page[row] * PAGE_BYTES + head * 2 * HEAD_BYTES

        # ---- the query heads of the group, on the log2 scale
        e = tid
        while e < GROUP * SLOTS:
            g = int64(uint32(e) // uint32(SLOTS))
            slot = e - g * SLOTS
            piece = min(slot, PIECES - 1)
            at = q + request * q_row_bytes + ((head * GROUP + g) * PIECES + piece) * 16
            words[0], words[1], words[2], words[3] = ld16(at)
            unpack_all(words, numbers)
            for n in range(PER_PIECE):
                number = float32(0)
                if slot < PIECES:
                    number = numbers[n] * float32(SCALE)
                i = uint32(((g * 2 * QUADS + n // 4) * SLOTS + slot) * 4 + n % 4)
                signed[i] = max(number, float32(0))
                signed[uint32(i + QUADS * SLOTS * 4)] = min(number, float32(0))
            e += SCORE_THREADS
        cuda.syncthreads()

        while tile * TILE < num_pages:
            for step in range(STEPS):
                in_tile = step * STEP_PAGES + warp * (PAGES * SIDE) + side
                for p in range(PAGES):  # loads only, so that all are under way at once
                    page = min(tile * TILE + in_tile + p * SIDE, num_pages - 1)
                    for r in range(ROUNDS):
                        piece = min(sub + r * LANES, PIECES - 1)
                        at = head_at + page * PAGE_BYTES + piece * 16
                        w = (p * ROUNDS + r) * 4
                        a, b, c, d = ld16(at)
                        max_words[w] = a
                        max_words[w + 1] = b
                        max_words[w + 2] = c
                        max_words[w + 3] = d
                        a, b, c, d = ld16(at + HEAD_BYTES)
                        min_words[w] = a
                        min_words[w + 1] = b
                        min_words[w + 2] = c
                        min_words[w + 3] = d
                unpack_all(max_words, maxima)
                unpack_all(min_words, minima)
                for g in range(GROUP):
                    for p in range(PAGES):
                        sums[p] = float32(0)
                    for r in range(ROUNDS):
                        for n in range(PER_PIECE):
                            slot = sub + r * LANES
                            i = uint32(((g * 2 * QUADS + n // 4) * SLOTS + slot) * 4 + n % 4)
                            up, down = signed[i], signed[uint32(i + QUADS * SLOTS * 4)]
                            for p in range(PAGES):
                                j = (p * ROUNDS + r) * PER_PIECE + n
                                sums[p] += up * maxima[j]
                                sums[p] += down * minima[j]
                    total = sums[0]
                    if PAGES == 4:
                        low_pages = sum_one_of(sums[0], sums[1], lane, 1)
                        high_pages = sum_one_of(sums[2], sums[3], lane, 1)
                        total = sum_one_of(low_pages, high_pages, lane, 2)
                    elif PAGES == 2:
                        total = sum_one_of(sums[0], sums[1], lane, 1)
                    step_lanes = PAGES
                    while step_lanes < LANES:
                        total += cuda.shfl_xor_sync(ALL_LANES, total, step_lanes)
                        step_lanes *= 2
                    if sub < PAGES:  # this lane has the sum of its page `sub`
                        i = in_tile + sub * SIDE
                        exists = tile * TILE + i < num_pages
                        tile_scores[g * TILE + i] = total if exists else float32(-INFINITY)
            cuda.syncthreads()

            # ---- a warp per query head: what softmax needs to know of the tile
            g = warp
            while g < GROUP:
                most = float32(-INFINITY)
                for j in range(TILES_OF_32):
                    most = max(most, tile_scores[g * TILE + j * 32 + lane])
                most = max_of_lanes(most, 32)
                total = float32(0)
                for j in range(TILES_OF_32):
                    i = j * 32 + lane
                    score = tile_scores[g * TILE + i]
                    head_scores[request, head * GROUP + g, tile * TILE + i] = score
                    total += exp2(score - most)
                total = sum_of_lanes(total, 32)
                if lane == 0:
                    tile_max[request, head * GROUP + g, tile] = most
                    tile_sum[request, head * GROUP + g, tile] = total
                g += WARPS
            cuda.syncthreads()
            tile += blocks_per_head

    return score_pages


@cache
def select_kernel(
    *, num_q_heads: int, page_size: int, top_k: int, num_threads: int, longest: int
) -> Kernel:
    """The blocks of a request share its pages; the last one to finish selects from all of them.

    longest: pages from which it does so alone; with more, each block first selects from its share.
    """
    HEADS, PAGE_SIZE, TOP_K, TOP_PAGES = num_q_heads, page_size, top_k, top_k // page_size
    THREADS, LONGEST, LIST = num_threads, longest, TOP_PAGES + 1  # of top_k_of_tiles
    # Each head has so many lanes that all heads are combined at once.
    HEAD_LANES = max(1, min(32, 1 << ((THREADS // num_q_heads).bit_length() - 1)))
    HEADS_AT_ONCE = THREADS // HEAD_LANES
    UNROLL = 8
    top_k_of_tiles = top_k_of_tiles_function(num_threads=THREADS, top_k=TOP_PAGES, stripes=2)

    @kernel(max_threads=num_threads)
    def select_pages(
        head_scores: float32[:, :, ::1],  # [>= R, Hq, pages] read
        tile_max: float32[:, :, ::1],  # [>= R, Hq, tiles] read
        tile_sum: float32[:, :, ::1],  # [>= R, Hq, tiles] read
        tile_pages: int64,
        seq_lens: int32[::1],  # [R] read
        num_real_reqs: int32[::1],  # [1] read
        page_scores: DEVICE_ADDRESS,  # [>= R, pages] float32 written
        candidates: DEVICE_ADDRESS,  # [>= R, C] float32 scratch, for top_k_of_tiles
        candidate_indices: int32[:, ::1],  # [>= R, C] scratch
        tickets: DEVICE_ADDRESS,  # [>= R] int32, 0 before and after
        positions: int32[:, ::1],  # [R, K] every entry is written
        blocks_per_request: int64,
    ):
        selected = cuda.shared.array(LIST, int32)
        head_max = cuda.shared.array(HEADS, float32)
        head_scale = cuda.shared.array(HEADS, float32)
        scores = cuda.local.array(UNROLL, float32)
        tid = cuda.threadIdx.x & 1023
        block = uint32(cuda.blockIdx.x)
        request = int64(block // uint32(blocks_per_request))
        part = int64(block) - request * blocks_per_request
        seq_len = int64(seq_lens[request])
        if request >= num_real_reqs[0] or seq_len < 1:
            if part == 0:
                i = tid
                while i < TOP_K:
                    positions[request, i] = -1
                    i += THREADS
            return
        num_pages = int64(uint32(seq_len + PAGE_SIZE - 1) // uint32(PAGE_SIZE))
        share = int64(uint32(num_pages + blocks_per_request - 1) // uint32(blocks_per_request))
        tile = max(int64(THREADS), (share + 3) & ~3)  # pages per block: one per thread, or more
        first = part * tile
        if first >= num_pages:
            return

        # ---- softmax of each head over all pages: its maximum, and one over its sum
        num_tiles = int64(uint32(num_pages + tile_pages - 1) // uint32(tile_pages))
        sub = tid & (HEAD_LANES - 1)
        for start in range(0, HEADS, HEADS_AT_ONCE):
            head = start + tid // HEAD_LANES
            h = min(head, HEADS - 1)
            most = float32(-INFINITY)
            t = sub
            while t < num_tiles:
                most = max(most, tile_max[request, h, t])
                t += HEAD_LANES
            most = max_of_lanes(most, HEAD_LANES)
            total = float32(0)
            t = sub
            while t < num_tiles:
                total += tile_sum[request, h, t] * exp2(tile_max[request, h, t] - most)
                t += HEAD_LANES
            total = sum_of_lanes(total, HEAD_LANES)
            if sub == 0 and head < HEADS:
                head_max[head] = most
                head_scale[head] = float32(1) / total
        cuda.syncthreads()

        # ---- scores of this block's pages
        row_at = page_scores + request * head_scores.shape[2] * 4
        page, end = first + tid, min(first + tile, num_pages)
        while page < end:
            score = float32(0)
            for start in range(0, HEADS, UNROLL):
                for u in range(UNROLL):  # loads only, so that all are under way at once
                    scores[u] = head_scores[request, min(start + u, HEADS - 1), page]
                for u in range(UNROLL):
                    h = start + u
                    if h < HEADS:
                        score += exp2(scores[u] - head_max[h]) * head_scale[h]
            if page == num_pages - 1:
                score = float32(INFINITY)  # the newest page is always read
            st4(row_at + 4 * page, bits_of_float(score))
            page += THREADS

        # ---- the best pages, and their positions
        count = top_k_of_tiles(
            row_at,
            num_pages,
            tile,
            int64(LONGEST),
            part,
            candidates + request * candidate_indices.shape[1] * 4,
            candidate_indices[request],
            tickets + 4 * request,
            selected,
        )
        if count >= 0:
            i = tid
            while i < TOP_K:
                rank = uint32(uint32(i) // uint32(PAGE_SIZE))
                position = int64(-1)
                if rank < count:
                    offset = i - int64(rank) * PAGE_SIZE
                    position = selected[rank] * PAGE_SIZE + offset
                positions[request, i] = position if position < seq_len else -1
                i += THREADS

    return select_pages
