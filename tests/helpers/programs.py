"""A program of several ranks for engine=command: without torch, so that it starts quickly."""

from pathlib import Path

RANKS = '''
"""Each rank sends a number to rank 0 each step: python ranks.py STEPS FAILING. The rank FAILING fails at step 12."""
import os, socket, subprocess, sys, time
rank, size, (steps, failing) = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), map(int, sys.argv[1:])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
print(f"rank {rank} of {size}, local rank {os.environ['LOCAL_RANK']}, node {os.environ['NODE_RANK']}", flush=True)
if rank == 0:
    server = socket.create_server(place)
    peers = [server.accept()[0] for _ in range(size - 1)]
while rank != 0:
    try:
        peers = [socket.create_connection(place)]
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
for step in range(1, steps + 1):
    time.sleep(0.02)
    if rank == failing and step == 12:
        subprocess.Popen(["sleep", "60"])  # as data workers do, it keeps the output open
        raise ValueError(f"rank {rank} has no rows")
    for peer in peers:
        peer.sendall(b"x")
        if not peer.recv(1):
            raise ConnectionResetError("another rank is gone")
    print(f"step {step} loss {rank + 3 / step:.4f}", flush=True)
'''
STEPS = 20
WORDS = (
    *("task=my_program", "engine.command.per=rank", "engine.command.adapter=plain", "recipe.log_every_steps=1"),
    r"engine.command.patterns=['step (?P<step>\d+) loss (?P<loss>\S+)']",
    *(f"task.training.max_steps={STEPS}", "launch.health=false"),
)


def words(folder: Path, *, failing: int = -1) -> list[str]:
    """Write the program to a folder; return the overrides that run it. The rank `failing` fails at step 12."""
    (folder / "ranks.py").write_text(RANKS)
    return [*WORDS, f"engine.command.argv=[python,{folder}/ranks.py,'{{max_steps}}','{failing}']"]
