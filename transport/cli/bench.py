"""``transport bench``: measures reads and, in a checkout, what else does the same work."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transport.cli.output import JsonTarget, about, causes, emit, status_of
from transport.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

    from transport.runtime.progress import Progress

app = typer.Typer(
    help="Measure reads on this host or between two.",
    epilog="Example: transport bench loopback --sizes 64KiB,1MiB",
    pretty_exceptions_enable=False,
)

_LOOPBACK_EXAMPLE = "Example: transport bench loopback --sizes 64KiB,1MiB --peers all --plot bench.png"
_SERVE_EXAMPLE = "Example: transport bench serve --port 7100"
_FETCH_EXAMPLE = "Example: transport bench fetch node7:7100 --wire rdma --listeners 4 --json rdma.json"


_WIRES = ("mapped", "shm", "tcp", "rdma")
_NETWORK = ("tcp", "rdma")
_MOST_CONCURRENT = 1024  # larger numbers are most likely typing mistakes
_Sizes = Annotated[str, typer.Option(metavar="SIZE,…", help="Payload sizes: bytes, KiB, MiB or GiB.")]
_Concurrency = Annotated[str, typer.Option(metavar="N,…", help="Numbers of concurrent reads.")]
_Seconds = Annotated[float, typer.Option(min=0.001, help="Seconds of reading for each row.")]
_Checksum = Annotated[
    str, typer.Option(metavar="on|off", help="Verify the writer's checksum in each read; on,off measures both.")
]
_Device = Annotated[
    str | None,
    typer.Option(metavar="cuda", help="Measure from device memory to device memory; needs CuPy. Default: host."),
]
_Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png", help="In a checkout: draw FILE-host.png and FILE-network.png."),
]
_Repetitions = Annotated[int, typer.Option(min=1, help="Repetitions in fresh processes; each row is their median.")]
_EVERYWHERE = "mapped,shm,tcp"


@app.command("loopback", epilog=_LOOPBACK_EXAMPLE)
def loopback(
    sizes: _Sizes = "64KiB,1MiB,16MiB",
    concurrency: _Concurrency = "1,8",
    seconds: _Seconds = 1.0,
    wire: Annotated[str, typer.Option(metavar="WIRE,…", help=f"Wires to measure: some of {', '.join(_WIRES)}.")] = (
        _EVERYWHERE
    ),
    readers: Annotated[int, typer.Option(min=1, max=14, help="Reader processes; each reads every payload.")] = 1,
    checksum: _Checksum = "on",
    peers: Annotated[
        str | None,
        typer.Option(metavar="all|NAME,…", help="In a checkout: alternatives to measure as well."),
    ] = None,
    device: _Device = None,
    plot: _Plot = None,
    repetitions: _Repetitions = 5,
    json_target: JsonTarget = None,
) -> int:
    """Measure reads from another process of this host; every payload is compared with what was written.

    Exit status 1 when one of our own reads failed; a peer that fails is reported and left out.
    """
    from transport.bench import session
    from transport.bench.checkout import beside
    from transport.bench.machine import machine, settings_of
    from transport.bench.reads import loopback as reads
    from transport.bench.result import OURS, BenchReport, Case, Row, Timing, table
    from transport.bench.units import parse_sizes

    _check_device(device)
    sizes_bytes = parse_sizes(sizes)
    concurrencies = _concurrencies(concurrency)
    wires = _wires(wire, _WIRES)
    work = reads.cases(sizes_bytes, concurrencies, wires, _checksums(checksum), readers, device is not None)
    if peers is not None:
        others, names = beside("--peers", "loopback"), beside("--peers", "registry").chosen(peers)
        work += others.cases(names, sizes_bytes, concurrencies, wires, _checksums(checksum))
    drawing = _picture(plot)

    def measure(case: Case) -> Timing:
        sample: Timing = (reads if case.peer == OURS else others).measure(case, seconds / repetitions)
        return sample

    where = machine()
    with _bar("measuring") as progress:
        outcome = session.run(work, repetitions, progress, measure, Row.of)
    report = BenchReport(machine=where, settings={each: settings_of(each) for each in wires}, **outcome._asdict())
    emit(report, "\n".join([about(report), "", table(outcome.rows, outcome.skipped)]), json_target)
    if drawing is not None and outcome.rows:
        drawing.draw_reads(report, plot)
    return status_of("transport bench loopback", causes(outcome.failed))


@app.command("serve", epilog=_SERVE_EXAMPLE)
def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port for requests; 0: any free port.")] = 7100,
    bind: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Local address to listen on. Default: all addresses.")
    ] = "",
    address: Annotated[
        str,
        typer.Option(metavar="ADDRESS,…", help="Addresses that readers connect to. Default: see transport doctor."),
    ] = "",
) -> None:
    """Serve payloads to `bench fetch` on another host, until Ctrl-C. Prints its port on one line when ready."""
    import threading

    from transport.bench.reads.remote import BenchServer
    from transport.runtime.signals import until_stopped

    with until_stopped() as stopped, BenchServer(bind, port, [each for each in address.split(",") if each]) as server:
        serving = threading.Thread(target=server.serve_forever, name="transport bench serve")
        serving.start()
        try:
            print(f"transport bench serve: ready on port {server.port}", flush=True)
            stopped.wait()
        finally:
            server.stop()
            serving.join()


@app.command("fetch", epilog=_FETCH_EXAMPLE)
def fetch(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Host and port of transport bench serve.")],
    wire: Annotated[str, typer.Option(help="tcp or rdma; fails when the bytes go over another wire.")] = "tcp",
    sizes: _Sizes = "64KiB,1MiB,16MiB",
    concurrency: _Concurrency = "1,8",
    seconds: _Seconds = 1.0,
    listeners: Annotated[
        int, typer.Option(min=1, max=15, help="Listeners on the other host: one port and process each.")
    ] = 1,
    checksum: _Checksum = "on",
    device: _Device = None,
    plot: _Plot = None,
    repetitions: _Repetitions = 3,
    json_target: JsonTarget = None,
) -> int:
    """Measure reads from another host; every payload is compared with what was written.

    Exit status 1, and no figures, when the bytes went over another wire than --wire.
    """
    from transport.bench.machine import machine, settings_of
    from transport.bench.reads import remote
    from transport.bench.result import BenchReport, Row, table
    from transport.bench.units import parse_sizes
    from transport.client.connections.pool import port_of
    from transport.doctor import infiniband

    host, port = port_of(server)
    if wire not in _NETWORK:
        raise UsageError(f"--wire {wire}: choose tcp or rdma; within one host use transport bench loopback")
    _wires(wire, _NETWORK)
    _check_device(device)
    drawing = _picture(plot)
    work = remote.cases(
        parse_sizes(sizes),
        _concurrencies(concurrency),
        wire,
        _checksums(checksum),
        device=device is not None,
    )
    rows: list[Row] = []
    where, before = machine(), infiniband.ports()
    with _bar("measuring") as progress:
        progress(0, len(work) * repetitions, 0)
        for at, case in enumerate(work):
            samples = []
            for repetition in range(repetitions):
                sample, other = remote.measure(host, int(port), case, seconds / repetitions, listeners)
                samples.append(sample)
                done = at * repetitions + repetition + 1
                progress(done, len(work) * repetitions, sum(row.reads * row.size_bytes for row in rows))
            rows.append(Row.of(case, samples))
    report = BenchReport(
        machine={**where, "server": other},
        settings={wire: settings_of(wire)},
        rows=rows,
        rails=infiniband.traffic(before, infiniband.ports()),
    )
    lines = [about(report), f"server: {other.get('cpu')}, {other.get('cores')} cores", "", table(rows, {})]
    lines += [f"port {name}: {size / 1e6:.1f} MB" for name, size in report.rails.items()]
    emit(report, "\n".join(lines), json_target)
    if drawing is not None:
        drawing.draw_reads(report, plot)
    return 0


def _picture(plot: Path | None) -> ModuleType | None:
    """Return the module that draws, once it is known that the picture can be drawn; None without a picture."""
    from transport.bench.checkout import beside

    if plot is None:
        return None
    drawing = beside("--plot", "plot")
    drawing.check(plot)
    return drawing


def _wires(names: str, among: tuple[str, ...]) -> list[str]:
    """Return the wires of a list, in the order of ``among``. UsageError for others, and for rdma without a device."""
    from transport.bench.units import parse_names

    wires = parse_names("--wire", names, among)
    if "rdma" in wires:
        from transport.doctor import infiniband

        infiniband.require()
    return wires


def _concurrencies(texts: str) -> list[int]:
    from transport.bench.units import parse_numbers

    return sorted(set(parse_numbers("--concurrency", texts, 1, _MOST_CONCURRENT)))


def _checksums(names: str) -> list[bool]:
    from transport.bench.units import parse_names

    return [name == "on" for name in parse_names("--checksum", names, ("on", "off"))]


def _check_device(name: str | None) -> None:
    """UsageError for another device than cuda, and whatever is wrong with that one."""
    from transport.devices.streams import require_device

    if name not in (None, "cuda"):
        raise UsageError(f"--device {name}: choose cuda")
    if name is not None:
        require_device()


def _bar(what: str) -> AbstractContextManager[Progress]:
    from transport.runtime.progress import bar_with_time_left

    return bar_with_time_left(what)  # on standard error: --json - keeps standard output for itself
