"""The CRDs that operators' projects publish, adapted to an API server of version 1.20.

What that server does not know is dropped: rules in CEL, keys of list maps, defaults of empty strings. Types, enums,
required and unknown fields stay.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from helpers.paths import ROOT

FOLDER = ROOT.parent / "shared/crds"
NAMES = (
    *("jobset.x-k8s.io_jobsets", "kubeflow.org_pytorchjobs"),
    *("trainer.kubeflow.org_trainjobs", "trainer.kubeflow.org_trainingruntimes"),
)
UNKNOWN = ("x-kubernetes-list-map-keys", "x-kubernetes-list-type", "x-kubernetes-validations")


def fitted(value: Any) -> Any:
    """Return a CRD, or a part of one, in the form that the old server accepts."""
    if isinstance(value, list):
        return [fitted(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {k: fitted(v) for k, v in value.items() if k not in UNKNOWN and not (k == "default" and v == "")}


def all_of_them() -> Iterator[tuple[str, str]]:
    """Yield the name and the YAML of each CRD."""
    for name in NAMES:
        path: Path = FOLDER / f"{name}.yaml.gz"
        definition = yaml.load(gzip.decompress(path.read_bytes()), Loader=yaml.CSafeLoader)
        yield definition["metadata"]["name"], yaml.dump(fitted(definition), Dumper=yaml.CSafeDumper)
