"""Converts another engine's dump of selections into a trace: `convert_trace.py DUMP TRACE`.

Its dump has a JSON object per line, that is, per decode step, of R requests and L layers:

    {"seq_lens": [R numbers], "topk_indices": [L lists of R lists of K positions]}

Positions may come in any order, with -1 where there is none; a request that takes no part in a step
has seq_len 0. What is no selection is refused, and the message says in which step. Then:

    python -m minihisparse trace replay TRACE --per-layer

The format of a trace, and what its metadata may say of the run: minihisparse/trace.py.
"""

import json
import sys

import torch

from minihisparse.trace_writer import write_steps

NONE = 2**31 - 1  # sorts behind every position


def steps_of(dump):
    with open(dump, encoding="utf-8") as lines:
        for step in map(json.loads, lines):
            positions = torch.tensor(step["topk_indices"], dtype=torch.int32)
            positions = positions.where(positions >= 0, NONE).sort().values
            seq_lens = torch.tensor(step["seq_lens"], dtype=torch.int32)
            yield positions.where(positions < NONE, -1), seq_lens


if __name__ == "__main__":
    write_steps(sys.argv[2], steps_of(sys.argv[1]))
