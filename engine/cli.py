"""`rlt-engine`: generate answers, or run the demonstration, over one prefill and one decode worker."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import CacheConfig, ConfigError, SamplingParams
from engine.embedded.files import directory
from engine.models.registry import UnsupportedModel
from engine.offline import Engine, Prompt, answer_all, answer_file, read_prompts
from engine.pd.config import PDConfig

EPILOG = """\
examples:
  rlt-engine generate "a71 q03 b55 ?qb="             the embedded model, prefill and decode apart
  rlt-engine generate --single --prompts in.jsonl    one process, for comparison
  rlt-engine generate --prompts in.jsonl --out out.jsonl
                                                     answer a file; run it again to go on where it was stopped
  rlt-engine demo --trace runs/demo                  answer the shipped prompts and show every handoff

exit codes: 0 done, 1 something did not hold, 2 bad usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rlt-engine",
        description="Serve looped transformers with prefill and decode in separate processes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{generate,demo}")
    generate = commands.add_parser("generate", help="answer prompts", description="Answer prompts and print them.")
    generate.add_argument("prompt", nargs="*", help="prompts")
    generate.add_argument(
        "--prompts",
        "--file",
        type=Path,
        metavar="FILE.jsonl",
        help="JSON lines: `prompt` or `prompt_ids`, perhaps `id`, and perhaps any sampling field, such as max_tokens",
    )
    generate.add_argument(
        "--out",
        type=Path,
        metavar="FILE.jsonl",
        help="write an answer or an error per prompt there, as each ends; ids that it has already are not asked again",
    )
    generate.add_argument("--single", action="store_true", help="one process instead of prefill and decode workers")
    _common(generate)
    generate.add_argument("--max-tokens", type=int, default=64, help="output tokens at most (default: 64)")
    generate.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all (default)")
    generate.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest mass p; 1 keeps all (default)")
    generate.add_argument("--stop", action="append", default=[], help="a text that ends the output; may be repeated")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--seed", type=int, help="of each request's own random stream")
    demo = commands.add_parser(
        "demo", help="the whole path once", description="Answer the shipped prompts, cancel some, show every handoff."
    )
    demo.add_argument(
        "--trace", type=Path, default=Path("runs/demo"), help="folder for the traces (default: runs/demo)"
    )
    _common(demo)
    args = parser.parse_args(argv)
    try:
        return _demo(args) if args.command == "demo" else _generate(args)
    except (ConfigError, UnsupportedModel, OSError) as error:
        print(f"rlt-engine: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # a worker failed: the message says which, how, and what was lost
        print(f"rlt-engine: {error}", file=sys.stderr)
        return 1


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, default=directory(), help="a checkpoint's folder (default: the embedded model)"
    )
    parser.add_argument("--prefill", default="cpu", metavar="DEVICE", help="cpu or cuda:N (default: cpu)")
    parser.add_argument("--decode", default="cpu", metavar="DEVICE", help="cpu or cuda:N (default: cpu)")
    parser.add_argument("--num-blocks", type=int, default=2048, help="pages of each worker (default: 2048)")
    parser.add_argument("--min-loops", type=int, help="loops before a token may exit (default: the checkpoint's)")
    parser.add_argument("--exit-threshold", type=float, help="exit probability to leave at; 1 never exits early")


def recommended(model: Path) -> dict[str, float]:
    """The checkpoint's own exit settings, from generation_config.json where it has them."""
    path = model / "generation_config.json"
    raw = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {key: raw[key] for key in ("min_loops", "exit_threshold") if key in raw}


def _params(args: argparse.Namespace, max_tokens: int) -> SamplingParams:
    exits = recommended(args.model)
    if args.min_loops is not None:
        exits["min_loops"] = args.min_loops
    if args.exit_threshold is not None:
        exits["exit_threshold"] = args.exit_threshold
    params = SamplingParams(max_tokens=max_tokens)
    if "min_loops" in exits:
        params = replace(params, min_loops=int(exits["min_loops"]))
    if "exit_threshold" in exits:
        params = replace(params, exit_threshold=float(exits["exit_threshold"]))
    return replace(params, temperature=getattr(args, "temperature", 0.0), seed=getattr(args, "seed", None))


def _generate(args: argparse.Namespace) -> int:
    defaults = replace(_params(args, args.max_tokens), top_k=args.top_k, top_p=args.top_p, stop=tuple(args.stop))
    prompts = [Prompt(f"prompt-{n}", text, defaults) for n, text in enumerate(args.prompt, 1)]
    if args.prompts is not None:
        prompts += read_prompts(args.prompts, defaults)
    if not prompts:
        raise ConfigError("prompt", "", "give prompts, or --prompts FILE.jsonl")
    with _engine(args) as engine:
        if args.out is not None:
            tally = answer_file(engine, prompts, args.out, lambda text: print(text, file=sys.stderr, flush=True))
            print(f"{args.out}: {tally.answered} answered, {tally.failed} refused, {tally.skipped} there before")
            return 1 if tally.failed else 0
        answers: dict[str, dict[str, Any]] = {}
        tally = answer_all(engine, prompts, lambda row: answers.update({row["id"]: row}))
        for prompt in prompts:
            row = answers[prompt.id]
            if "error" in row:
                print(f"rlt-engine: {prompt.id}: {row['error']}", file=sys.stderr)
            else:
                print(row["text"] if row["text"] is not None else row["token_ids"])
        return 1 if tally.failed else 0


@contextlib.contextmanager
def _engine(args: argparse.Namespace) -> Iterator[Engine]:
    """One process, or a prefill and a decode worker."""
    if args.single:
        from engine.local import LLMEngine

        yield LLMEngine(args.model, CacheConfig(args.num_blocks), device=args.decode)
    else:
        from engine.pd.engine import PDEngine

        with PDEngine(args.model, _pd_config(args)) as engine:
            yield engine


def _pd_config(args: argparse.Namespace, trace: Path | None = None) -> PDConfig:
    cache = CacheConfig(args.num_blocks)
    return PDConfig(
        prefill_device=args.prefill, decode_device=args.decode, prefill_cache=cache, decode_cache=cache, trace_dir=trace
    )


def _demo(args: argparse.Namespace) -> int:
    from engine.demo import run_demo

    path = args.model / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    started = time.monotonic()
    ok = run_demo(args.model, rows, _pd_config(args, args.trace), lambda n: _params(args, n))
    print(f"demo: {'everything holds' if ok else 'SOMETHING DOES NOT HOLD'} ({time.monotonic() - started:.1f} s)")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
