"""Whether this site can start the image: Pyxis on this machine, its flags, the file, the registry's credentials."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.backends.slurm.argument_checks import FLAGS_WITHOUT_VALUE
from bench.backends.slurm.site_checks import last_line, question
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded
from bench.contract.schema import ContainerFlags, Runtime
from bench.contract.slurm import Slurm
from bench.errors import ConfigError
from bench.rules.check import CannotTellError, Finding, Subject, broken

_ABORTED = (-6, 134)
"""How a program ends that its own assertion stops."""
_FLAG = re.compile(r"--((?:no-)?container-[a-z-]+)(?![a-z=-])")


def probe(plan: Plan, script: str) -> list[str]:
    """Return the srun command that shows whether this Slurm takes the script's flags without a value, if there are any.

    It stands with the job's own options and starts nothing.
    """
    if not has_bare_flags(plan):
        return []
    flags = [f"--{name}" for name in dict.fromkeys(_FLAG.findall(script)) if name in FLAGS_WITHOUT_VALUE]
    s = plan.config.cluster.slurm or Slurm()
    own = {"partition": s.partition, "account": s.account, "qos": s.qos, "reservation": s.reservation}
    options = [f"--{key}={value}" for key, value in own.items() if value]
    return ["srun", "--test-only", "--nodes=1", "--ntasks=1", "--time=1", *options, *flags, "true"]


def in_container(plan: Plan) -> bool:
    """Return whether the ranks run in an image."""
    return plan.config.container.runtime is Runtime.pyxis


def has_bare_flags(plan: Plan) -> bool:
    """Return whether srun is told container flags that take no value."""
    return in_container(plan) and plan.config.container.flags is ContainerFlags.arguments


def is_file(plan: Plan) -> bool:
    """Return whether the image is a file."""
    return in_container(plan) and (expanded(plan.config.container.image) or "").startswith(("/", "."))


def is_in_registry(plan: Plan) -> bool:
    """Return whether the image is fetched from a registry, or a daemon, when the job starts."""
    return in_container(plan) and expanded(plan.config.container.image) is not None and not is_file(plan)


def plugin(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether srun does not know the container flags."""
    if "--container-image" not in question(subject, "srun").out:
        yield broken("PYX-02", "srun of this machine does not know --container-image", "srun --help")


def flags(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether this Slurm aborts on flags without a value. This depends on its build, not on its version."""
    words = probe(subject.plan, subject.script)
    answer = question(subject, " ".join(words))
    if answer.exit_code in _ABORTED or "Assertion" in answer.err:
        fix = "set container.flags=environment (Pyxis 0.21 or later)"
        yield broken("PYX-01", f"srun: {last_line(answer.err)}", " ".join(words), fix=fix)
    elif "unrecognized option" in answer.err:
        raise CannotTellError(f"srun: {last_line(answer.err)}")


def file(subject: Subject) -> Iterator[Finding | str]:
    """Yield what is wrong with the image's file; all of it is read if it has changed since it last was."""
    from bench.images import store

    image = expanded(subject.plan.config.container.image)
    assert image is not None
    if not Path(image).is_file():
        fix = "`python -m bench image import` makes one; or correct CONT"
        yield broken("ENR-07", "there is no such image here", image, fix=fix)
        return
    try:
        yield from (replace(found, where=image) for found in store.faults_since_change(Path(image)))
    except OSError as error:
        yield broken("ENR-07", f"the image cannot be read: {error.strerror}", image)


def credentials(subject: Subject) -> Iterator[Finding | str]:
    """Yield which machine Enroot's credentials do not name, for an image that comes from a registry."""
    from bench.images import import_checks, reference

    image = expanded(subject.plan.config.container.image)
    assert image is not None
    try:
        found = import_checks.warnings(reference.read(image), Path("/"))
    except ConfigError as error:  # a name that nobody can read is another check's
        raise CannotTellError(error.what) from error
    yield from (replace(warning, where=image) for warning in found if warning.rule == "ENR-01")
