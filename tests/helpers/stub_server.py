"""A server that only injects faults: `python -m helpers.stub_server PORT FAULT`. No latency of it means anything.

It answers /health and /v1/completions as an OpenAI API does, a word for every token, without any model.
"""

import asyncio
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

served = answered = 0
"""How many requests have arrived, and how many have their whole answer."""
TOGETHER = 6
"""With the fault "together" no request is answered before so many have arrived."""
bodies = list[dict[str, Any]]()
"""The requests, in order of arrival."""


def event(text: str | None, usage: dict[str, int] | None = None) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: str) -> None:
    global answered, served
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    if head.startswith("GET /health"):
        writer.write(
            b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            % (b"503 Busy" if fault == "never" else b"200 OK")
        )
        return
    if head.startswith(("POST /start_profile", "POST /stop_profile")):
        if head.startswith("POST /stop_profile") and fault != "no trace":
            Path(os.environ["STUB_PROFILE"], "worker_0.pt.trace.json").write_text(json.dumps(profile()))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        return
    length = int(next(line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")))
    body = json.loads(await reader.readexactly(length))
    bodies.append(body)
    served += 1
    this = served  # others come while this one is answered
    if fault == "killed" and this > 12:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "errors" and this > 8 and this % 4 == 0:
        writer.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\nConnection: close\r\n\r\noops")
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    while fault == "together" and served < TOGETHER:
        await asyncio.sleep(0.001)
    num_requested = body["max_tokens"]
    tokens = num_requested - 1 if fault == "short" and this > 8 else num_requested
    shown = tokens // 4 if fault == "liar" and this > 8 else tokens
    if fault == "hangs" and this > 8 and this % 5 == 0:
        await asyncio.sleep(3600)
    for number in range(shown):
        if fault == "cut" and this > 8 and this % 5 == 0 and number == 2:
            writer.transport.abort()
            return
        if fault != "bunched":
            await asyncio.sleep(0.2 if fault == "slow" and number == 0 else 0.01)
        writer.write(event(f" w{number}"))
        await writer.drain()
    answered += 1
    num_prompt_tokens = len(body["prompt"].split()) + (fault == "prompt" and this > 8)
    writer.write(event(None, {"prompt_tokens": num_prompt_tokens, "completion_tokens": tokens}) + b"data: [DONE]\n\n")


def profile() -> dict[str, Any]:
    """Return a trace of three decode steps of two layers on a GPU, 100 us for each kernel and before each step."""
    layer = ("rms_norm_kernel", "gemm", "rotary_kernel", "flash_fwd_kernel(int)", "rms_norm_kernel", "gemm")
    names = [*layer * 2, "rms_norm_kernel", "gemm"]
    return {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 100 * at, "dur": 100}
            | {"args": {"device": 0, "stream": 7}}
            for step in range(3)
            for at, name in enumerate(names, 1 + step * (len(names) + 1))
        ]
    }


async def listening(port: int, fault: str) -> asyncio.Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer, fault)
        finally:
            writer.close()

    return await asyncio.start_server(handle, "127.0.0.1", port, backlog=512)


async def main(port: int, fault: str) -> None:
    async with await listening(port, fault) as server:
        await server.serve_forever()


@contextmanager
def in_a_thread(fault: str, *, port: int = 0, before: int = 0) -> Iterator[str]:
    """Serve in a thread of this process for as long as the block; yield the address.

    `before` is how many requests count as served already: the faults come with those after the eighth.
    """
    global answered, served
    served, answered = before, 0
    bodies.clear()
    ready = queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]]()

    async def live() -> None:
        async with await listening(port, fault) as server:
            over = asyncio.Event()
            ready.put((asyncio.get_running_loop(), over, server.sockets[0].getsockname()[1]))
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()), name="stub server", daemon=True)
    thread.start()
    loop, over, used = ready.get(timeout=10)
    try:
        yield f"http://127.0.0.1:{used}"
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
