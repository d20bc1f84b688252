"""What the op allocates: in a loop over chunks its outputs and nothing else, and not much beside the buffers in all."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from support.attention_cases import inputs
from torch.profiler import ProfilerActivity, profile

from lightning_seq1f1b.ops import library, native

CHUNK, KEYS = 64, 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loop_over_chunks_allocates_its_outputs_only(dtype: torch.dtype) -> None:
    assert native.available(), native.reason()
    query, key, value = (t.detach() for t in inputs(KEYS, KEYS, rows=1, heads=8, size=64, dtype=dtype))
    buffers = [torch.empty(1, 2, KEYS, 64, dtype=dtype) for _ in range(2)]
    totals = [torch.zeros(1, 2, KEYS, 64) for _ in range(2)]
    options = (0.125, 0, 0.0, None, None)
    spans = [slice(start, start + CHUNK) for start in range(0, KEYS, CHUNK)]

    def loop() -> int:
        """Bytes of what the ops return."""
        results = []
        for span in spans:
            for buffer, tensor in zip(buffers, (key, value), strict=True):
                library.append(buffer, tensor[:, :, span], span.start)
            seen = [buffer[:, :, : span.stop] for buffer in buffers]
            results.append(library.attend(query[:, :, span], *seen, *options))
        gradients = []
        for span, (output, lse) in zip(reversed(spans), reversed(results), strict=True):
            seen = [buffer[:, :, : span.stop] for buffer in buffers]
            collected = [total[:, :, : span.stop] for total in totals]
            gradients.append(
                library.attend_backward(output, query[:, :, span], *seen, output, lse, *collected, *options)
            )
        return sum(t.nbytes for t in (*gradients, *(t for pair in results for t in pair)))

    loop()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        returned = loop()
    allocated = sum(
        event.cpu_memory_usage for event in profiled.events() if event.name == "[memory]" and event.cpu_memory_usage > 0
    )
    if not allocated:  # allocations inside an op are charged to it
        allocated = sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())
    assert returned <= allocated <= returned * 1.01


PEAK = """
import sys
import torch
from lightning_seq1f1b.ops import library, native

def resident(what):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))

def run(length, dtype):
    generator = torch.Generator().manual_seed(0)
    draw = lambda heads: torch.randn(1, length, heads, 64, generator=generator).to(dtype).transpose(1, 2)
    query, key, value, gradient = draw(8), draw(2), draw(2), draw(8)
    totals = [torch.ones(1, 2, length, 64) for _ in range(2)]
    outputs = [torch.ones_like(query), torch.ones(1, 8, length), torch.ones_like(query)]
    held = sum(t.nbytes for t in (query, key, value, gradient, *totals, *outputs))
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak starts again at what is resident now
    before = resident("VmRSS")
    options = (0.125, 0, 0.0, None, None)
    chunk = length // 4
    for start in range(0, length, chunk):
        span = slice(start, start + chunk)
        seen = (key[:, :, :span.stop], value[:, :, :span.stop])
        output, lse = library.attend(query[:, :, span], *seen, *options)
        outputs[0][:, :, span], outputs[1][:, :, span] = output, lse
        del output, lse
    for start in reversed(range(0, length, chunk)):
        span = slice(start, start + chunk)
        seen = (key[:, :, :span.stop], value[:, :, :span.stop])
        collected = [total[:, :, :span.stop] for total in totals]
        forward = (outputs[0][:, :, span], outputs[1][:, :, span].contiguous())
        outputs[2][:, :, span] = library.attend_backward(
            gradient[:, :, span], query[:, :, span], *seen, *forward, *collected, *options)
    largest_result = query[:, :, :chunk].nbytes + 8 * chunk * 4
    return resident("VmHWM") - before - largest_result, held

assert native.available(), native.reason()
torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[1])
run(64, dtype)
extra, held = run(16384, dtype)
print(extra, held)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_that_of_the_buffers(dtype: str) -> None:
    """A process that holds the buffers of 16,384 tokens grows by at most 5 % of them while it computes."""
    # A fixed threshold, so that what is freed goes back to the system at once instead of being kept by malloc.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK), dtype],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    extra, held = map(int, done.stdout.split())
    assert extra <= 0.05 * held, f"{extra / 2**20:.1f} MiB beside {held / 2**20:.1f} MiB"
