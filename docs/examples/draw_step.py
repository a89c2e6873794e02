"""Draw the bytes alive through a step of a Llama, plain and with `checkpoint_`, as measured.

    python docs/examples/draw_step.py --measure   # takes both steps, writes docs/examples/step.json
    python docs/examples/draw_step.py             # draws them: docs/step.svg

Bytes are those that mod-tracker's `trace(memory=True)` counts: what a step allocates, without the
parameters and gradients that were there before. One moment is one change of them, so no clock is
in the picture, and the same code gives the same picture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from draw_llama import WIDTH, head, text

HERE = Path(__file__).parent
HEIGHT, LEFT, TOP, BOTTOM = 340, 88, 100, 34
STYLE = """
  .area { fill-opacity: 0.35 } .plain { stroke: #757575 } .way { stroke: #3f51b5 }
  .line { stroke: #bbb }
  @media (prefers-color-scheme: dark) { .line { stroke: #555 } .way { stroke: #7986cb } }
"""


def area(run: dict[str, Any], x: float, y: float, name: str) -> str:
    """The bytes of one step as an area; `x` and `y` are pixels for a moment and a byte."""
    floor = HEIGHT - BOTTOM
    points = (f"{LEFT + i * x:.1f},{floor - b * y:.1f}" for i, b in enumerate(run["live_bytes"]))
    end = LEFT + x * (len(run["live_bytes"]) - 1)
    shape = f"{LEFT},{floor} {' '.join(points)} {end:.1f},{floor}"
    return f'  <polygon class="{name} area" points="{shape}"/>'


def peak(run: dict[str, Any], x: float, y: float, said: str) -> list[str]:
    """A line at the most that is alive at once, and whose it is."""
    most = run["peak_bytes"]
    height = HEIGHT - BOTTOM - most * y
    ends = f'x1="{LEFT}" x2="{WIDTH - 10}" y1="{height:.1f}" y2="{height:.1f}"'
    return [
        f'  <line class="line" {ends} stroke-dasharray="4 3"/>',
        text(LEFT - 8, height + 4, f"{most / 2**20:.1f} MiB", anchor="end"),
        text(WIDTH - 10, height - 6, said, "small", "end"),
    ]


def draw(result: dict[str, Any]) -> str:
    """The chart as SVG."""
    plain, ours = result["runs"]
    if not result["equal"]:
        raise ValueError("draw_step: gradients differ, so there is nothing to compare.")
    y = (HEIGHT - TOP - BOTTOM) / plain["peak_bytes"]
    x = (WIDTH - LEFT - 10) / (max(len(run["live_bytes"]) for run in (plain, ours)) - 1)
    versions, model = result["versions"], result["model"]
    under = [
        f"{model['class']}, {model['num_hidden_layers']} layers, {model['batch']} x "
        f"{model['tokens']} tokens; torch {versions['torch']},",
        f"transformers {versions['transformers']}; every gradient equal to the last bit",
    ]
    parts = [
        *head("Bytes that a training step holds, from start to end", under, HEIGHT, STYLE),
        area(plain, x, y, "plain"),
        area(ours, x, y, "way"),
        *peak(plain, x, y, "plain: most at the end of forward"),
        *peak(ours, x, y, "checkpoint_(layer): runs again in backward"),
    ]
    parts.append(text(LEFT + plain["forward"] * x, HEIGHT - 14, "| backward begins"))
    return "\n".join([*parts, "</svg>", ""])


def step(model: Any, **batch: Any) -> dict[str, Any]:
    """Bytes alive after each change of them in one step, and at which one backward begins."""
    from mod_tracker import trace

    model(**batch).loss.backward()  # gradients and the allocator are there
    for param in model.parameters():
        param.grad.zero_()
    with trace(model, memory=True) as traced:
        model(**batch).loss.backward()
    events = sorted(json.loads(traced.to_json())["traceEvents"], key=lambda event: event["ts"])
    changes = [event for event in events if event["ph"] == "C"]
    begins = next(e["ts"] for e in events if e["ph"] == "B" and e["args"]["phase"] != "forward")
    live = [event["args"]["live bytes"] for event in changes]
    forward = sum(event["ts"] < begins for event in changes)
    return {"peak_bytes": max(live), "forward": forward, "live_bytes": live}


def measure() -> dict[str, Any]:
    """A step of the same Llama without and with checkpoints."""
    import measure_llama
    import torch
    import transformers

    from ckpt_wrap import checkpoint_

    size = measure_llama.SIZE
    ids = torch.randint(size["vocab_size"], (measure_llama.BATCH, measure_llama.TOKENS))
    plain, ours = measure_llama.build(), measure_llama.build()
    for layer in ours.model.layers:
        checkpoint_(layer)
    runs = [
        {"way": way} | step(model, input_ids=ids, labels=ids)
        for way, model in (("plain", plain), ("checkpoint_(layer)", ours))
    ]
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    return {
        "model": {"class": "LlamaForCausalLM", **size, "batch": len(ids), "tokens": ids.shape[1]},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "equal": all(torch.equal(p.grad, q.grad) for p, q in pairs),
        "runs": runs,
    }


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        (HERE / "step.json").write_text(json.dumps(measure()) + "\n", encoding="utf-8")
    found = json.loads((HERE / "step.json").read_text(encoding="utf-8"))
    (HERE.parent / "step.svg").write_text(draw(found), encoding="utf-8")
