"""The particle physics that both scenarios share: damped bodies, soft contacts.

`B` worlds, `M` moving bodies, `F` bodies that push. A body is a row that begins with x, y, vx, vy. The rules and
constants are those of the Multi-Particle Environment (Lowe et al. 2017), with unit mass.
"""

from __future__ import annotations

import numpy as np

from noisy_envs.arrays import Array, namespace

DT = 0.1  # seconds
DAMPING = 0.25  # share of the velocity lost in a step
CONTACT_FORCE = 100.0  # newton for each unit of overlap
CONTACT_MARGIN = 1e-3  # width over which a contact sets in
# so far apart nothing is felt: exp(-104) is zero in float32, exp(-746) in float64
NEGLIGIBLE = {"f": 104 * CONTACT_MARGIN, "d": 746 * CONTACT_MARGIN}
NO_DISTANCE = 1e-37  # added to distances, all of which but zero swallow it: nothing is divided by zero


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


def add_contacts(position: Array, others: Array, force: Array, reach: Array, present: Array | None = None) -> Array:
    """Add the forces with which `others` push bodies away that come nearer than `reach`.

    Two bodies at one point have no direction to part in: they do not push, instead of NaN.

    Args:
        position: (B, M, 2) of the pushed.
        others: (B, F, 2) of the pushing.
        force: (B, M, 2) on the pushed so far.
        reach: (M, F) sums of both radii; −1 for a body and itself.
        present: (B, M, F) bool, False where either is padding.

    Returns:
        Forces (B, M, 2).
    """
    xp = namespace(position)
    delta = position[:, :, None] - others[:, None]  # (B, M, F, 2)
    distance = length(delta)  # (B, M, F, 1)
    gap = distance - reach[..., None]
    if xp is np and gap.min() > NEGLIGIBLE[gap.dtype.char]:
        return force  # what follows would add zeros; in a single world this is common, and worth asking
    overlap = gap * (-1 / CONTACT_MARGIN)
    push = xp.logaddexp(overlap, 0.0 * overlap)  # log(1 + exp(overlap))
    if present is not None:
        push = xp.where(present[..., None], push, xp.zeros_like(push))
    # the method is twice as fast as the function where arrays are small
    return force + (delta / (distance + NO_DISTANCE) * push).sum(axis=2) * (CONTACT_FORCE * CONTACT_MARGIN)


def length(vector: Array) -> Array:
    """Return the lengths (..., 1) of plane vectors (..., 2)."""
    return namespace(vector).hypot(vector[..., :1], vector[..., 1:])
