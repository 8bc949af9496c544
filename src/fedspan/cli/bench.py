"""`fedspan bench`: which way of simulating the clients of a spec is fastest on this machine."""

from __future__ import annotations

from fedspan.cli._options import Changes, Plugin, SpecFile, Threads, load_plugins, load_spec


def command(
    spec: SpecFile, changes: Changes = None, plugin: Plugin = None, threads: Threads = 1
) -> None:
    """Time the ways of simulating the clients of a spec.

    A run does not look at the clock: what is faster here is for you to set. On several threads, and with "batched",
    results may differ in the last digits.
    """
    load_plugins(plugin)
    from fedspan.api.bench import bench
    from fedspan.cli._tables import console, say, table

    loaded = load_spec(spec, changes, threads)
    with console.status("a few rounds in every way"):
        found = bench(loaded)
    rows = [
        (f"{one.simulate}, as the spec runs" if one.chosen else one.simulate, f"{one.seconds:.3g}")
        for one in found
    ]
    console.print(table(("simulate", "seconds per round"), rows))
    best = min(found, key=lambda one: one.seconds)
    usual = next(one for one in found if one.chosen)
    if best.seconds < 0.9 * usual.seconds:
        say(f"--simulate {best.simulate} is {usual.seconds / best.seconds:.1f} times as fast here")
    else:
        say("no other way is faster here")
