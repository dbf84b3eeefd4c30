"""Particle physics: damped bodies with soft contacts, after the Multi-Particle Environment (Lowe et al. 2017).

`B` environments, `M` moving bodies, `F` bodies that push them. A body is a row that starts with x, y, vx, vy; its mass
is 1.

In torch, gradients of a step are finite everywhere, and zero where they are undefined, at distance zero. Therefore the
branches that `where` discards must be finite too: 0 · inf would turn the whole gradient into NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from noisy_envs.arrays import Array, namespace

DT = 0.1  # seconds
DAMPING = 0.25  # fraction of the velocity lost in a step
CONTACT_FORCE = 100.0  # newtons per unit of overlap
CONTACT_MARGIN = 1e-3  # distance over which a contact sets in
# at this distance the force is zero: exp(-104) is 0 in float32, exp(-746) in float64
NEGLIGIBLE_32, NEGLIGIBLE_64 = 104 * CONTACT_MARGIN, 746 * CONTACT_MARGIN
TINY = 1e-37  # avoids division by zero; added to any other distance it is lost in rounding


class ContactRange(NamedTuple):
    """Distances at which pairs of M and F bodies touch."""

    radii: Array  # (M, F) sums of the two radii; −1 for pairs that do not collide
    near: Array  # (M, F) squared distances from which on the force is zero


def contact_range(radii: Array) -> ContactRange:
    """Return the contact range of pairs whose radii sum to `radii` (M, F), or −1 for pairs that do not collide."""
    xp = namespace(radii)
    farthest = radii + (NEGLIGIBLE_64 if radii.dtype == xp.float64 else NEGLIGIBLE_32)
    return ContactRange(radii, farthest.clip(0.0, None) ** 2 * 1.001)  # the factor allows for rounding


def integrate(body: Array, force: Array, max_speed: Array) -> Array:
    """Advance bodies by one step: positions change by the *old* velocity, then velocities change.

    Args:
        body: (B, M, D); features after the velocity are kept.
        force: (B, M, 2) in newtons.
        max_speed: (M, 1) limits on the new speed.

    Returns:
        The bodies (B, M, D) one step later.
    """
    if isinstance(body, np.ndarray) and len(body) > 1:
        return _integrate_components(body, force, max_speed[:, 0])
    xp = namespace(body)
    velocity = body[..., 2:4]
    position = body[..., :2] + velocity * DT
    velocity = velocity * (1.0 - DAMPING) + force * DT
    # x / max(x, limit) is exactly 1 below the limit, and never divides by zero
    velocity = velocity * (max_speed / xp.maximum(length(velocity), max_speed))
    return xp.concat([position, velocity, body[..., 4:]], axis=-1)


def _integrate_components(body: np.ndarray, force: np.ndarray, max_speed: np.ndarray) -> np.ndarray:
    """Do what `integrate` does, bit for bit, in a third of the time: NumPy is slow if the last axis is short."""
    moved = body.copy()
    x, y = (body[..., i] * (1.0 - DAMPING) + force[..., i - 2] * DT for i in (2, 3))
    limited = max_speed / np.maximum(np.hypot(x, y), max_speed)
    for i, component in enumerate((x, y)):
        moved[..., i] += body[..., i + 2] * DT
        moved[..., i + 2] = component * limited
    return moved


def add_contacts(
    position: Array, others: Array, force: Array, reach: ContactRange, present: Array | None = None
) -> Array:
    """Add to `force` the contact forces with which `others` push bodies away.

    The force between two bodies at the same point is 0, not NaN, since it has no direction.

    The plain version, used in torch, evaluates all M · F pairs. In NumPy, two paths with bitwise equal results are
    faster: several environments evaluate only the few pairs in range, as softplus and hypot dominate the cost of a
    step, and a single one sums stacked components, as for few pairs the number of NumPy calls dominates.

    Args:
        position: (B, M, 2) of the bodies.
        others: (B, F, 2) positions of the bodies that push them.
        force: (B, M, 2) on the bodies so far.
        reach: contact range of each pair.
        present: (B, M, F) bool, False where either body is absent.

    Returns:
        Total forces (B, M, 2).
    """
    x = position[:, :, None, 0] - others[:, None, :, 0]  # (B, M, F)
    y = position[:, :, None, 1] - others[:, None, :, 1]
    factor = CONTACT_FORCE * CONTACT_MARGIN
    if isinstance(x, np.ndarray):
        in_range = x * x + y * y < reach.near
        near = (in_range if present is None else in_range & present).reshape(-1).nonzero()[0]
        if not len(near):
            return force
        if len(force) > 1:
            contact, pairs = np.zeros_like(force), reach.radii.reshape(-1)
            push = _push(x.reshape(-1)[near], y.reshape(-1)[near], pairs[near % len(pairs)])
            np.add.at(contact.reshape(-1, 2), near // others.shape[1], np.stack(push, axis=1))
            return force + contact * factor
        # stacked before the sum: NumPy adds along an axis that is not the last in order, bitwise as `add.at` does
        return force + np.stack(_push(x, y, reach.radii, present), axis=-1).sum(axis=2) * factor
    push = _push(x, y, reach.radii, present)
    return force + namespace(x).stack([part.sum(axis=2) for part in push], axis=-1) * factor


def _push(x: Array, y: Array, radii: Array, present: Array | None = None) -> tuple[Array, Array]:
    """Return both components (...) of the contact force, in units of CONTACT_FORCE · CONTACT_MARGIN."""
    distance = apart = hypotenuse(x, y)
    if not isinstance(x, np.ndarray):
        apart = namespace(x).where(distance > 0, distance, math.inf)
    push, inverse = softplus((distance - radii) * (-1 / CONTACT_MARGIN)), 1 / (apart + TINY)
    if present is not None:
        push = namespace(push).where(present, push, 0.0)
    return x * inverse * push, y * inverse * push


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x)); torch's `logaddexp` is not vectorised in compiled code."""
    if isinstance(x, np.ndarray):
        return np.logaddexp(x, 0.0 * x)
    xp = namespace(x)
    return x.clip(0.0, None) + xp.log1p(xp.exp(-abs(x)))


def hypotenuse(x: Array, y: Array) -> Array:
    """Return sqrt(x² + y²); torch's more exact `hypot` is not vectorised in compiled code either."""
    if isinstance(x, np.ndarray):
        return np.hypot(x, y)
    xp = namespace(x)
    longer, shorter = xp.maximum(abs(x), abs(y)), xp.minimum(abs(x), abs(y))
    return longer * (1.0 + (shorter / (longer + TINY)) ** 2) ** 0.5  # squares of x and y could underflow


def length(vector: Array) -> Array:
    """Return the lengths (..., 1) of vectors (..., 2)."""
    x, y = vector[..., :1], vector[..., 1:]
    if isinstance(vector, np.ndarray):
        return np.hypot(x, y)
    xp = namespace(vector)
    zero = (x == 0) & (y == 0)
    return xp.where(zero, 0.0, xp.hypot(xp.where(zero, 1.0, x), y))


def root(x: Array) -> Array:
    """Return the square roots of non-negative numbers, with gradient 0 at 0."""
    if isinstance(x, np.ndarray):
        return np.sqrt(x)
    xp = namespace(x)
    return xp.where(x == 0, 0.0, xp.sqrt(xp.where(x == 0, 1.0, x)))
