# SPDX-License-Identifier: Apache-2.0
"""Which processes are wanted: include and exclude rules of the configuration."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..target.cgroup import Membership
from .config import Rule, Targets


@dataclass(frozen=True, slots=True)
class Candidate:
    """What rules are asked about."""

    program: str
    model: str | None
    member: Membership
    uid: int


def wanted(candidate: Candidate, targets: Targets) -> bool:
    """Meets an include rule (none given: any process does) and no exclude rule."""
    if targets.include and not any(meets(candidate, rule) for rule in targets.include):
        return False
    return not any(meets(candidate, rule) for rule in targets.exclude)


def meets(candidate: Candidate, rule: Rule) -> bool:
    """Whether every pattern that the rule has fits."""
    container = candidate.member.container
    pairs = (
        (rule.program, [os.path.basename(candidate.program), candidate.program]),
        (rule.unit, [candidate.member.unit]),
        (rule.container, [container, container[:12] if container else None]),
        (rule.model, [candidate.model]),
        (rule.user, [str(candidate.uid), _user(candidate.uid)]),
    )
    for pattern, names in pairs:
        if pattern is not None and not any(fnmatchcase(name, pattern) for name in names if name):
            return False
    return True


def _user(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
