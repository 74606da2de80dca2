"""`aerie models`: what this gateway knows how to serve."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from app.presets.about import About, about_preset
from app.presets.memory import capacity, fewest_gpus, graphs, need
from app.settings import Settings, of_preset, preset_names

# Size by name -> GiB that the driver reports, of the GPUs in GPU_NAMES.
GPU_SIZES = {24: 22.5, 48: 45.0, 80: 79.6, 141: 140.4, 180: 179.1}
GPU_NAMES = {24: "L4, A10G", 48: "L40S", 80: "H100", 141: "H200", 180: "B200"}


def main(arguments: Sequence[str]) -> int:
    """Print the table of presets, or all about one. Raises SettingsError for an unknown one."""
    parser = argparse.ArgumentParser(prog="aerie models", description=__doc__, allow_abbrev=False)
    parser.add_argument("preset", nargs="?", help="a preset's name, or a TOML file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    names = [options.preset] if options.preset else preset_names()
    found = [describe(name) for name in names]
    if options.json:
        print(json.dumps(found[0] if options.preset else found, indent=2))
    elif options.preset:
        print(_page(found[0]))
    else:
        print(_table(found))
    return 0


def describe(name: str) -> dict[str, Any]:
    """What `--json` prints about one preset."""
    settings, about = of_preset(name), about_preset(name)
    needed = need(settings, about)
    return {
        "preset": name,
        "target": settings.model.model,
        "head": settings.speculation.drafter,
        "method": _method(settings, about),
        "k": settings.speculation.k,
        "serve_k": about.serve_k,
        "trained_k": about.trained_k,
        "dtype": settings.model.dtype,
        "quantization": settings.model.quantization,
        "kv_cache_dtype": settings.engine.engine_args.get("kv_cache_dtype", "auto"),
        "max_model_len": settings.engine.max_model_len,
        "tool_call_parser": settings.model.tool_call_parser,
        "reasoning_parser": settings.model.reasoning_parser,
        "memory_gib": round(needed.total, 1) if needed else None,
        "memory": needed.sum() if needed else None,
        "gpus": _gpus(settings, name),
        "steps": _steps(settings, about),
        "notes": list(about.notes),
    }


def _method(settings: Settings, about: About) -> str | None:
    """The kind of head; None without one."""
    if not settings.speculation.drafter:
        return None
    return about.head.method if about.head else "p-eagle"


def _gpus(settings: Settings, name: str) -> dict[str, int | None]:
    """GPU size by name -> how many of them the pair needs; None: more than eight."""
    about = about_preset(name)
    return {str(size): fewest_gpus(settings, about, gib) for size, gib in GPU_SIZES.items()}


def _steps(settings: Settings, about: About) -> dict[str, dict[str, Any]]:
    """GPU size by name -> the largest step of an engine there, and what its CUDA graphs take."""
    steps = {}
    for size, gib in GPU_SIZES.items():
        shape, captured = capacity(settings, about, gib), graphs(settings, about, gib)
        steps[str(size)] = {
            "tokens": shape.tokens,
            "sequences": shape.sequences,
            "graphs": sum(captured.counts) if captured else None,
            "capture_seconds": round(captured.seconds, 1) if captured else None,
            "graphs_gib": round(captured.gib, 1) if captured else None,
        }
    return steps


def _table(found: Sequence[dict[str, Any]]) -> str:
    """The table of presets, one line each."""
    rows = [["preset", "target", "head", "method", "K", "memory GiB", "on 80 GB GPUs"]]
    for entry in found:
        low, high = entry["serve_k"] or (None, None)
        gpus = entry["gpus"]["80"]
        rows.append(
            [
                entry["preset"],
                _short(entry["target"]),
                _short(entry["head"]) if entry["head"] else "none known: --drafter",
                entry["method"] or "-",
                str(entry["k"]) + (f" ({low} to {high})" if low is not None else ""),
                "-" if entry["memory_gib"] is None else f"{entry['memory_gib']:.1f}",
                "more than 8" if gpus is None else str(gpus),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.append(
        "Memory: on one GPU, with the KV cache of one longest sequence. `aerie models NAME`"
    )
    lines.append("shows the sum, with notes; `aerie serve --preset NAME` serves it.")
    return "\n".join(lines)


def _page(entry: dict[str, Any]) -> str:
    """All that is known of one preset."""
    order = (
        "target", "head", "method", "k", "serve_k", "trained_k", "dtype", "quantization",
        "kv_cache_dtype", "max_model_len", "tool_call_parser", "reasoning_parser",
    )  # fmt: skip
    width = max(map(len, order))
    lines = [f"{key:<{width}}  {'-' if entry[key] is None else entry[key]}" for key in order]
    if entry["memory"]:
        lines += ["", f"memory: {entry['memory']}"]
        fits = (
            f"{size} GB ({GPU_NAMES[int(size)]}): {'more than 8' if count is None else count}"
            for size, count in entry["gpus"].items()
        )
        lines.append(f"GPUs needed (tensor parallel) by size: {', '.join(fits)}")
        lines.append("Others of a size may have more: a 4090 has 1.5 GiB more than an L4.")
        lines += ["", "the largest step by size of the GPU, and the CUDA graphs of a start:"]
        lines += [f"- {size} GB: {_step(step)}" for size, step in entry["steps"].items()]
    if entry["notes"]:
        lines += ["", *(f"- {note}" for note in entry["notes"])]
    return "\n".join(lines)


def _step(step: dict[str, Any]) -> str:
    """One size's entry of `_steps`, as text."""
    text = f"{step['tokens']:,} tokens of {step['sequences']:,} sequences"
    if step["graphs"] is None:
        return text
    return (
        f"{text}; {step['graphs']} graphs, about {step['capture_seconds']:.0f} s and "
        f"{step['graphs_gib']} GiB"
    )


def _short(model: str) -> str:
    """A folder by its last two parts."""
    return "/".join(model.split("/")[-2:]) if model.startswith("/") else model
