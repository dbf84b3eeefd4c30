"""Write docs/environments from the registry and the docstrings: python tools/make_pages.py.

A test compares them with what this would write. The GIFs are of tools/make_gallery.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import gymnasium

from noisy_envs import ENVIRONMENTS
from noisy_envs.baselines import baseline_returns
from noisy_envs.registration import GAMES, PARALLEL
from noisy_envs.training.files import write_atomically

DOCS = Path(__file__).parents[1] / "docs"
HEAD = "<!-- made by tools/make_pages.py of the docstrings and the registry: edit those, then run it -->\n"
ARGUMENT = re.compile(r"^\* ((?:`\w+`(?:, )?)+): (.*(?:\n  .*)*)\n?", re.MULTILINE)


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {"index.md": overview()} | {f"{game}.md": page(game) for game in GAMES}


def ids(game: str) -> list[str]:
    """Return the ids of a game."""
    return [env_id for env_id, (own, _) in ENVIRONMENTS.items() if own == game]


def film(env_id: str, width: int) -> str:
    """Show the GIF of an id."""
    name = env_id.partition("/")[2]
    return f'<img src="../images/gallery/{name}.gif" alt="an episode of {name}" width="{width}">'


def overview() -> str:
    """Show every id."""
    made = json.loads((DOCS / "images" / "gallery" / "made.json").read_text(encoding="utf-8"))
    parts = [
        HEAD,
        "# Environments\n",
        "Each game has a general environment ID, whose options you choose. The other IDs fix options, which their "
        "names show: most of them are the paper's experiments, and `SimpleTagMPE-v0` is MPE's game. `1v3v28` means "
        "1 agent, 3 signal entities and 28 noise entities, in SimpleTag 1 predator, 3 prey and 28 obstacles. The "
        "training scripts use the [`paper` preset](../howto/train.md#presets) for the paper's experiments and `fast` "
        "for the others.\n",
        f"The videos show the {made['policy']}, a hand-written policy with full information: "
        f"`python {made['script']}`, seed {made['seed']} (IDs that play alike have different seeds), "
        f"commit {made['commit']}. Signal and noise differ in lightness and shape as well as in hue. In BoxWorld, "
        "borders mark tokens; the agent's is the widest.\n",
    ]
    for name, game in GAMES.items():
        parts += [f"## {game.__name__}\n", f"{summary(game)} [Rules and options]({name}.md).\n"]
        parts += ['<div class="gallery">']
        parts += [
            f"<figure>{film(env_id, 330)}<figcaption><code>{env_id}</code></figcaption></figure>"
            for env_id in ids(name)
        ]
        parts += ["</div>\n"]
    return "\n".join(parts)


def page(name: str) -> str:
    """Describe a game: its ids, and the docstring under Gymnasium's headings."""
    game: Any = GAMES[name]
    first = ids(name)[0]
    env: Any = gymnasium.make(first).unwrapped
    parts = [
        HEAD,
        f"# {game.__name__}\n",
        film(first, 400) + "\n",
        summary(game) + "\n",
        "| | |\n|---|---|",
        f"| Action space | `{env.action_space}` |",
        f"| Observation space | `Box({env.observation_space.shape}, {env.observation_space.dtype})` |",
        f'| Made by | `gymnasium.make("{first}")` |',
    ]
    parts += [f"| Render modes | {', '.join(f'`{mode}`' for mode in game.render_modes)} |"]
    parts += [f"| Several agents | `noisy_envs.{module}` |" for module, general in PARALLEL.items() if general == first]
    parts += ["", "## Environment IDs\n", table_of_ids(name)]
    for heading, text in sections(game).items():
        parts += [f"## {heading}\n", with_table(text, game) if heading == "Arguments" else text, ""]
    return "\n".join(parts)


def summary(game: type) -> str:
    """Return the first line of a docstring."""
    return inspect.getdoc(game).split("\n")[0]  # type: ignore[union-attr]


def sections(game: type) -> dict[str, str]:
    """Return the parts of a docstring by their headings."""
    found = re.split(r"^## (.*)\n", inspect.getdoc(game) or "", flags=re.MULTILINE)[1:]
    return {heading: text.strip() for heading, text in zip(found[::2], found[1::2], strict=True)}


def table_of_ids(game: str) -> str:
    """List a game's ids: options, shape, noise, and the returns of the reference policies."""
    rows = ["| environment ID | options | observation | SNR at the start | random | oracle |", "|---" * 6 + "|"]
    for env_id in ids(game):
        env: Any = gymnasium.make(env_id).unwrapped
        tokens, info = env.reset(seed=0)
        options = ", ".join(f"`{name}={value!r}`" for name, value in ENVIRONMENTS[env_id][1].items())
        snr = f"{info['signal_mask'].sum()}/{env.token_spec.mask(tokens).sum()}"
        returns = " | ".join(f"{value:.3f}".replace("-", "−") for value in baseline_returns(env_id))
        rows.append(f"| `{env_id}` | {options or 'defaults'} | `{tokens.shape}` | {snr} | {returns} |")
    made = json.loads(
        (Path(inspect.getfile(baseline_returns)).parent / "baseline_returns.json").read_text(encoding="utf-8")
    )
    rows.append(
        "\nObservations are tokens × features; SNR is the [share of signal tokens](../../README.md#first-episode). "
        f"Mean returns of {made['episodes']:,} episodes of the reference policies, `{made['script']}`, "
        f"seed {made['seed']:,}.\n"
    )
    return "\n".join(rows)


def with_table(text: str, game: type) -> str:
    """Turn the list of arguments into a table with their defaults; what else there is stays below."""
    defaults = {field.name: field.default for field in dataclasses.fields(game)}
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for listed, meaning in ARGUMENT.findall(text):
        names = re.findall(r"\w+", listed)
        values = [defaults.pop(name) for name in names]  # one that does not exist, or named twice, raises here
        shown = dict.fromkeys(f"`{value:,}`" if type(value) is int else f"`{value!r}`" for value in values)
        rows.append(f"| {listed} | {', '.join(shown)} | {' '.join(meaning.split())} |")
    if defaults:
        raise ValueError(f"the docstring of {game.__name__} says nothing of {', '.join(defaults)}")
    return "\n".join([*rows, "", ARGUMENT.sub("", text).strip()]).strip()


def main() -> None:
    """Write them all."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, text in pages().items():
        write_atomically(DOCS / "environments" / name, text.rstrip() + "\n")


if __name__ == "__main__":
    main()
