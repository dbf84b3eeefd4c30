"""The particle physics that both scenarios share: damped bodies, soft contacts.

`B` worlds, `M` moving bodies, `F` bodies that push. A body is a row x, y, vx, vy. The rules and constants are
those of the Multi-Particle Environment (Lowe et al. 2017), with unit mass.
"""

from __future__ import annotations

from noisy_envs.arrays import Array, namespace

DT = 0.1  # seconds
DAMPING = 0.25  # share of the velocity lost in a step
CONTACT_FORCE = 100.0  # newton for each unit of overlap
CONTACT_MARGIN = 1e-3  # width over which a contact sets in


def integrate(body: Array, force: Array, max_speed: Array) -> Array:
    """Advance bodies by one step: the position moves with the *old* velocity, then the velocity changes.

    Args:
        body: (B, M, 4).
        force: (B, M, 2) in newton.
        max_speed: (B, M, 1) limits of the new speed.

    Returns:
        The bodies (B, M, 4) one step later.
    """
    xp = namespace(body)
    velocity = body[..., 2:]
    position = body[..., :2] + velocity * DT
    velocity = velocity * (1.0 - DAMPING) + force * DT
    # x / max(x, limit) is exactly 1 below the limit, and never divides by zero
    velocity = velocity * (max_speed / xp.maximum(length(velocity), max_speed))
    return xp.concat([position, velocity], axis=-1)


def contact_force(position: Array, others: Array, reach: float, present: Array | None = None) -> Array:
    """Sum the forces with which `others` push bodies away that come nearer than `reach`.

    Two bodies at one point have no direction to part in: their force is zero, not NaN. A body is therefore
    also safe against itself.

    Args:
        position: (B, M, 2) of the pushed.
        others: (B, F, 2) of the pushing.
        reach: sum of both radii.
        present: (B, F) bool, False for padding, which pushes nobody.

    Returns:
        Forces (B, M, 2).
    """
    xp = namespace(position)
    delta = position[:, :, None] - others[:, None]  # (B, M, F, 2)
    distance = length(delta)  # (B, M, F, 1)
    overlap = (reach - distance) / CONTACT_MARGIN
    # log(1 + exp(x)) without overflow
    softplus = xp.maximum(overlap, xp.zeros_like(overlap)) + xp.log1p(xp.exp(-xp.abs(overlap)))
    touching = xp.where(distance > 0, distance, xp.ones_like(distance))
    force = delta / touching * (CONTACT_FORCE * CONTACT_MARGIN * softplus)
    if present is not None:
        force = xp.where(present[:, None, :, None], force, xp.zeros_like(force))
    return xp.sum(force, axis=2)


def length(vector: Array) -> Array:
    """Return the lengths (..., 1) of plane vectors (..., 2)."""
    return namespace(vector).hypot(vector[..., :1], vector[..., 1:])
