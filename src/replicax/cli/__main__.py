"""The command line: `replicax demo`, `replicax doctor`."""

from __future__ import annotations

from pathlib import Path

import cyclopts

app = cyclopts.App(
    name="replicax", help="Write a training step once, for one replica; run it on any placement of devices."
)


@app.command
def demo(*, steps: int = 200, devices: int = 4, output: Path = Path("demo-output")) -> None:
    """Train a small network on handwritten digits under several strategies and compare them.

    Parameters
    ----------
    steps
        Training steps per strategy.
    devices
        How many CPU devices to make where there is no accelerator.
    output
        The folder for the plot.
    """
    from replicax.cli import _demo

    _demo.run(steps, devices, output)


@app.command
def doctor() -> None:
    """Say how this machine looks to replicax: devices, threads, allocator, and what to change."""
    from rich.console import Console

    import replicax as rx

    console = Console()
    console.print(rx.host.describe())
    console.print(rx.MirroredStrategy())


def main() -> None:
    app()


if __name__ == "__main__":
    main()
