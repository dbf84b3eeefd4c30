"""The particle physics that both scenarios share: damped bodies, soft contacts.

`B` worlds, `M` moving bodies, `F` bodies that push. A body is a row that begins with x, y, vx, vy. The rules and
constants are those of the Multi-Particle Environment (Lowe et al. 2017), with unit mass.

In torch a step has finite gradients everywhere. Where there is no slope, at a distance of zero, they are zero: branches
that `where` leaves out must be finite too, since 0 · inf would make the whole gradient NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from noisy_envs.arrays import Array, namespace

DT = 0.1  # seconds
DAMPING = 0.25  # share of the velocity lost in a step
CONTACT_FORCE = 100.0  # newton for each unit of overlap
CONTACT_MARGIN = 1e-3  # width over which a contact sets in
# so far apart nothing is felt: exp(-104) is zero in float32, exp(-746) in float64
NEGLIGIBLE_32, NEGLIGIBLE_64 = 104 * CONTACT_MARGIN, 746 * CONTACT_MARGIN
NO_DISTANCE = 1e-37  # added to distances, all of which but zero swallow it: nothing is divided by zero


class Reach(NamedTuple):
    """How far M bodies are felt by F others, or themselves."""

    radii: Array  # (M, F) sums of both radii; −1 for a body and itself
    near: Array  # (M, F) squares of the distances from which on nothing is felt, at most by rounding


def reaches(radii: Array) -> Reach:
    """Return the reach of pairs whose radii sum to `radii` (M, F), or −1 for a body and itself."""
    xp = namespace(radii)
    farthest = radii + (NEGLIGIBLE_64 if radii.dtype == xp.float64 else NEGLIGIBLE_32)
    return Reach(radii, farthest.clip(0.0, None) ** 2 * 1.001)  # a little more, as squares are rounded


def integrate(body: Array, force: Array, max_speed: Array) -> Array:
    """Advance bodies by one step: the position moves with the *old* velocity, then the velocity changes.

    Args:
        body: (B, M, D); what follows the velocity is kept.
        force: (B, M, 2) in newton.
        max_speed: (M, 1) limits of the new speed.

    Returns:
        The bodies (B, M, D) one step later.
    """
    xp = namespace(body)
    velocity = body[..., 2:4]
    position = body[..., :2] + velocity * DT
    velocity = velocity * (1.0 - DAMPING) + force * DT
    # x / max(x, limit) is exactly 1 below the limit, and never divides by zero
    velocity = velocity * (max_speed / xp.maximum(length(velocity), max_speed))
    return xp.concat([position, velocity, body[..., 4:]], axis=-1)


def add_contacts(position: Array, others: Array, force: Array, reach: Reach, present: Array | None = None) -> Array:
    """Add the forces with which `others` push bodies away that come nearer than they reach.

    Two bodies at one point have no direction to part in: they do not push, instead of NaN.

    Args:
        position: (B, M, 2) of the pushed.
        others: (B, F, 2) of the pushing.
        force: (B, M, 2) on the pushed so far.
        reach: of each pair.
        present: (B, M, F) bool, False where either is padding.

    Returns:
        Forces (B, M, 2).
    """
    x = position[:, :, None, 0] - others[:, None, :, 0]  # (B, M, F)
    y = position[:, :, None, 1] - others[:, None, :, 1]
    factor = CONTACT_FORCE * CONTACT_MARGIN
    if isinstance(x, np.ndarray):  # the zeros that most others add are left out, to the bit
        seen = x * x + y * y < reach.near
        near = (seen if present is None else seen & present).reshape(-1).nonzero()[0]
        if not len(near):
            return force
        if len(force) > 1:
            felt, pairs = np.zeros_like(force), reach.radii.reshape(-1)
            push = _push(x.reshape(-1)[near], y.reshape(-1)[near], pairs[near % len(pairs)])
            np.add.at(felt.reshape(-1, 2), near // others.shape[1], np.stack(push, axis=1))
            return force + felt * factor
        # stacked first: NumPy sums up an axis that is not the last one number after another, as `add.at` does
        return force + np.stack(_push(x, y, reach.radii, present), axis=-1).sum(axis=2) * factor
    push = _push(x, y, reach.radii, present)
    return force + namespace(x).stack([part.sum(axis=2) for part in push], axis=-1) * factor


def _push(x: Array, y: Array, radii: Array, present: Array | None = None) -> tuple[Array, Array]:
    """Return how bodies so far apart (...), whose radii sum to (...), push each other, along both axes."""
    distance = apart = hypotenuse(x, y)
    if not isinstance(x, np.ndarray):
        apart = namespace(x).where(distance > 0, distance, math.inf)
    push, nearness = softplus((distance - radii) * (-1 / CONTACT_MARGIN)), 1 / (apart + NO_DISTANCE)
    if present is not None:
        push = namespace(push).where(present, push, 0.0)
    return x * nearness * push, y * nearness * push


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x)); torch's own `logaddexp` is not vectorised where it is compiled."""
    if isinstance(x, np.ndarray):
        return np.logaddexp(x, 0.0 * x)
    xp = namespace(x)
    return x.clip(0.0, None) + xp.log1p(xp.exp(-abs(x)))


def hypotenuse(x: Array, y: Array) -> Array:
    """Return the lengths of many pairs by their components; nor is torch's own `hypot`, which is exacter."""
    if isinstance(x, np.ndarray):
        return np.hypot(x, y)
    xp = namespace(x)
    longer, shorter = xp.maximum(abs(x), abs(y)), xp.minimum(abs(x), abs(y))
    return longer * (1.0 + (shorter / (longer + NO_DISTANCE)) ** 2) ** 0.5  # squares of x and y could underflow


def length(vector: Array) -> Array:
    """Return the lengths (..., 1) of plane vectors (..., 2)."""
    x, y = vector[..., :1], vector[..., 1:]
    if isinstance(vector, np.ndarray):
        return np.hypot(x, y)
    xp = namespace(vector)
    still = (x == 0) & (y == 0)
    return xp.where(still, 0.0, xp.hypot(xp.where(still, 1.0, x), y))


def root(x: Array) -> Array:
    """Return the square roots of numbers that are not negative."""
    if isinstance(x, np.ndarray):
        return np.sqrt(x)
    xp = namespace(x)
    return xp.where(x == 0, 0.0, xp.sqrt(xp.where(x == 0, 1.0, x)))
