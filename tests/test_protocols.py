"""tests/protocols.py names every part that a registry has."""

import re
from pathlib import Path

from minivllm import features

NAMED = set(re.findall(r"\w+", (Path(__file__).parent / "protocols.py").read_text().partition("\nschedulers")[2]))
REGISTRIES = (  # of classes; the others hold functions that build something
    *(features.SCHEDULERS, features.ADMISSIONS, features.PREEMPTIONS, features.POLICIES, features.PREFIX_INDEXES),
    *(
        features.INPUT_BUILDERS,
        features.ATTENTION,
        features.LATENT_ATTENTION,
        features.FORWARDS,
        features.EXECUTORS,
        features.ROUTERS,
    ),
    features.GRAMMARS,
)


def test_every_option_of_a_registry_is_checked_against_its_protocol():
    classes = {registry.get(name).__name__ for registry in REGISTRIES for name in registry.names()}
    assert classes and classes <= NAMED, classes - NAMED
