"""The rows of a plan that say how transformers described its model, and where its activations come from."""

from collections.abc import Iterator

from bench.contract.described_model import Described, Probe
from bench.contract.model import Model


def rows(model: Model) -> Iterator[tuple[str, str]]:
    """Yield how the model was counted, and how its layers were probed; nothing for a model that runstop has itself."""
    if (described := model.described) is not None:
        yield "counted", _counted(described)
        if described.probe is not None:
            yield "activations", _probed(described.probe)


def _counted(described: Described) -> str:
    """Return how the plan's table describes the model."""
    active = ""
    if described.active_parameters != described.parameters:
        active = f", of which a token uses {described.active_parameters:,}"
    uncounted = ""
    if described.num_uncounted_layers:
        uncounted = (
            f"; operations of {described.num_uncounted_layers} layers of another kind than attention are not counted"
        )
    stored = "; MXFP4 experts are dequantised to BF16 on load" if described.is_mxfp4 else ""
    counted = f"counted by transformers {described.transformers} on the meta device{active}"
    return f"{described.architecture}: {counted}{uncounted}{stored}"


def _probed(probe: Probe) -> str:
    """Return where the activations of a plan come from."""
    layers = f"{probe.num_kinds} layers, one of each kind" if probe.num_kinds > 1 else "1 layer"
    scaled = f" ({probe.scaled})" if probe.scaled else ""
    return f"probed: a forward pass of {probe.tokens} tokens through {layers}, on a CPU{scaled}"
