#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serve the tiny Kimi K3 and ask it through the OpenAI endpoint.

Starts the command that `scripts/serve.sh --tiny --print` prints with this Python (so it
also works where vLLM is on PYTHONPATH only), waits for it, sends completions of
different prompt lengths, one alone and all at once, and stops it.

    python scripts/serve_check.py --out DIR [--eager] [--port 8017]

Writes DIR/serve.log and DIR/serve_check.json; exits with 1 if an answer is missing or
the same request is answered differently.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = (5, 100, 1000, 3000)
ANSWER_TOKENS = 16
START = time.time()


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.time() - START:6.1f} s] {text}", flush=True)


def command(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the server's command and environment."""
    options = ["--port", str(args.port), "--host", "127.0.0.1"]
    if args.eager:
        options.append("--enforce-eager")
    line = subprocess.run(
        ["bash", str(HERE / "serve.sh"), "--tiny", "--print", "--", *options],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    words = shlex.split(line)
    first = words.index("vllm")
    env = dict(os.environ, HF_HUB_OFFLINE="1")
    for word in words[:first]:
        name, _, env[name] = word.partition("=")
    model = words[first + 2]
    subprocess.run(
        [sys.executable, HERE / "tiny_k3.py", "--write-only", "--dir", model],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    python = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    return python + words[first + 1 :], env


def ask(port: int, prompt: list[int]) -> list[float]:
    """Complete a prompt of token ids greedily; return the log-probabilities."""
    body = dict(
        model="tiny-k3",
        prompt=prompt,
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        logprobs=1,
        ignore_eos=True,
    )
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            choice = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {error.read().decode()[:500]}") from error
    return choice["logprobs"]["token_logprobs"]


def wait(server: subprocess.Popen, port: int, seconds: float) -> None:
    """Wait until the server answers.

    Raises:
        RuntimeError: It ended, or took too long.

    """
    end = time.time() + seconds
    while time.time() < end:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            url = f"http://127.0.0.1:{port}/health"
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"no answer within {seconds:.0f} s")


def check(port: int) -> dict:
    """Send the requests one by one and together; return what came back."""
    prompts = [
        [(7 * i + j) % 4000 + 4 for j in range(n)] for i, n in enumerate(PROMPT_TOKENS)
    ]
    alone = [ask(port, p) for p in prompts]
    say("each prompt was answered alone")
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda p: ask(port, p), prompts))
    say("all prompts were answered together")
    counts = [len(a) for a in alone + together]
    values = [v for a in alone + together for v in a]
    return dict(
        prompt_tokens=PROMPT_TOKENS,
        answered=all(n == ANSWER_TOKENS for n in counts),
        finite=all(v == v and abs(v) != float("inf") for v in values),
        largest_difference=max(
            abs(p - q)
            for x, y in zip(alone, together, strict=True)
            for p, q in zip(x, y, strict=True)
        ),
    )


def main() -> int:
    """Serve, ask, stop."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/serve_check"))
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--timeout", type=float, default=400, help="start-up, s")
    parser.add_argument("--limit", type=float, default=0.05, help="nats")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    words, env = command(args)
    say("starting: " + shlex.join(words))
    log = args.out / "serve.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            words, env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait(server, args.port, args.timeout)
        say("the server is up")
        result = check(args.port)
    except (OSError, RuntimeError) as error:
        say(f"FAILED: {error}; end of {log}:")
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]))
        return 1
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
    (args.out / "serve_check.json").write_text(json.dumps(result))
    print(json.dumps(result))
    good = result["answered"] and result["finite"]
    good = good and result["largest_difference"] <= args.limit
    say("OK" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
