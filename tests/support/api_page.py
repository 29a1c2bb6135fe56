"""docs/API.md and docs/api/ from signatures and docstrings; ``python tests/docs/test_docs.py`` writes them.

`pages` makes them all. An adapter needs its framework to be imported, so its part is read from the source.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import transport
from transport import config, cooldown, errors, queue, rendezvous, store, testing
from transport.client import trace
from transport.packer import prefetch

ROOT = Path(__file__).resolve().parents[2]

HEAD = """# The interface, name by name

This page is for those who write code against the package: what is public, and where each name is described. The pages
are generated from the docstrings; `python tests/docs/test_docs.py` writes them.

**Public** is what the pages below describe, the commands with their JSON ([OPERATIONS.md](OPERATIONS.md#commands)), and
the names of metrics and settings. It changes with a line in the CHANGELOG, and before 1.0 only in a minor version. A
name that begins with an underscore, or is not here, may change at any time.

| `from transport import …` | what it is |
|---|---|
| `Schema`, `TensorSpec`, `UpTo` | named tensors, one of them, and the ragged leading dimension of one |
| `SharedRingBuffer`, `SlotState` | the ring, and the four states of a slot |
| `Ticket` | names one payload |
| `UCXXServer` | listeners for a ring |
| `UCXXClient`, `BlockingClient` | ticket to payload, with and without an event loop |
| `ReceivedPayload`, `ReadOutcome` | what `read` returns, and each item of `read_many` |
| `Rollout`, `Trainer` | a rollout worker and a trainer, to use as they are |
| `UCXXRolloutMixin`, `UCXXDataPackerMixin` | the same for a framework's own classes |
| `RingOptions`, `ServerOptions`, `ClientOptions` | their further choices |
| `Settings` | every default; operators set them without code ([CONFIGURATION.md](CONFIGURATION.md)) |
| `TransportError`, `StaleSlotError` | the base of all errors, and that for a payload no longer in its slot |

"""

# Page of docs/api, what it is for, and its names: of the module before the colon.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "data": (
        "Payloads and tickets",
        "How a payload is described and named",
        ("transport: Schema TensorSpec UpTo Ticket SlotState Settings StaleSlotError TransportError",),
    ),
    "ring": (
        "The ring",
        "Payloads in shared memory: to make a ring and write into it; [reading](ring_reading.md) has a page of its own",
        ("transport: SharedRingBuffer", "transport.ring.leases: WriteLease", "transport.ring.states: RingStatistics"),
    ),
    "ring_reading": (
        "Reading from the ring",
        "What `SharedRingBuffer` has for readers of its host, and the batches that both clients return",
        (
            "transport.ring.reading: RingReading",
            "transport.ring.leases: ReadLease",
            "transport.ring.claimed: ClaimedPayload",
            "transport.ring.batch: Batch",
            "transport.ring.batches: PayloadBatch",
            "transport.claims.in_place: TakenPayloads",
        ),
    ),
    "client": (
        "The client",
        "From a ticket, or a ring's address, to a payload",
        (
            "transport: UCXXClient ReadOutcome ReceivedPayload",
            "transport.client.trace: Trace merge",
        ),
    ),
    "blocking": (
        "The client without a loop, and the server",
        "`BlockingClient`, `UCXXServer`, and how both are configured",
        (
            "transport: BlockingClient UCXXServer",
            "transport.client.payload: ClientStatistics",
            "transport.config: load configuration",
            "transport.runtime.signals: until_stopped",
            "transport.runtime.progress: bar",
        ),
    ),
    "packer": (
        "Rollout and trainer",
        "The two classes of a job, and the mixins for a framework's own",
        (
            "transport: Rollout Trainer UCXXRolloutMixin UCXXDataPackerMixin",
            "transport.packer.prefetch: FetchedBatch FetchedItem",
        ),
    ),
    "options": (
        "Options of rollout and trainer",
        "The further choices of `setup_ucxx` and `setup_ucxx_packer`, and what they count and remember",
        (
            "transport: RingOptions ServerOptions ClientOptions",
            "transport.observe.statistics: PackerStatistics",
            "transport.packer.consumed_record: ConsumedRecord",
        ),
    ),
    "queue": (
        "Queues: the interface",
        "What every queue of tickets does, and how one is opened",
        (
            "transport.queue: open_queue TicketQueue Claim QueuedTicket QueueDepth Failure Notice DeliveryState",
            "transport.queue: finished KEEP_FINISHED MAX_DELIVERIES",
        ),
    ),
    "rings": (
        "The rings as the queue",
        "Queues without a service of their own; [CLAIMS.md](../CLAIMS.md) explains them",
        ("transport.queue: FoundRings RingQueue", "transport.queue.group: GroupQueue"),
    ),
    "queues": (
        "SQLite and Redis as the queue",
        "Queues that keep tickets beside the rings; [CLUSTER.md](../CLUSTER.md) explains their set-up",
        ("transport.queue: SQLiteQueue RedisQueue",),
    ),
    "store": (
        "Small shared records",
        "Records with versions and leases, and the directory of servers in them",
        (
            "transport.store: open_store Store SQLiteStore RedisStore Entry Change ABSENT",
            "transport.store.directory: Directory",
        ),
    ),
    "weights": (
        "Weights: updates",
        "Weights from trainers to replicas, as the manager sees them; [WEIGHTS.md](../WEIGHTS.md) explains an update",
        ("transport.weights: WeightUpdate Outcome WeightsStatistics Limits Admission Taker Offer offer",),
    ),
    "weights_members": (
        "Weights: members",
        "Trainers and replicas of an update, and the engine of each",
        (
            "transport.weights: Trainer Source Replica RolloutWorker ReferenceWorker",
            "transport.weights: RingEngine EngineOptions EngineStatistics weights_checksum",
        ),
    ),
    "weights_sharded": (
        "Weights: shards",
        "Layouts of trainers and receivers, and the ends that move slices; [SHARDED_WEIGHTS.md](../SHARDED_WEIGHTS.md) "
        "explains them",
        (
            "transport.weights.sharding.layouts: Layout",
            "transport.weights.sharding.shards: whole box rows chunk columns even fused gate_up qkv stacked experts",
            "transport.weights.sharded.engine: ShardEngine",
            "transport.weights.sharded.replica: ShardedReplica ShardRank",
            "transport.weights.sharded.meeting: RankShards Meeting of_dtensors",
        ),
    ),
    "joined": (
        "Payloads of several stages",
        "A stage's new fields and its parents, read as one payload; [PAYLOADS.md](../PAYLOADS.md) explains it",
        ("transport.joined: PARENTS Parent with_parents write_group read_joined join JoinedPayload",),
    ),
    "rendezvous": (
        "Members and spares",
        "Membership of a run; [MEMBERSHIP.md](../MEMBERSHIP.md) explains it",
        ("transport.rendezvous: Rendezvous Rules ExitCodes Roster Place Role Closing Reason Archive Keys close_run",),
    ),
    "cooldown": (
        "Checkpoints",
        "An epoch's end and its checkpoint; [COOLDOWN.md](../COOLDOWN.md) explains it",
        (
            "transport.cooldown: CooldownClient ShardedClient CooldownHost open_destination check_permissions restore "
            "Restored recorded_outcomes Outcome Part Taken",
        ),
    ),
    "cooldown_records": (
        "Checkpoints: records and destinations",
        "What cooldowns write down, and where files go; [CHECKPOINTS.md](../CHECKPOINTS.md) explains it",
        ("transport.cooldown: Ledger EpochRecord Phase Proof Destination",),
    ),
    "adapters": (
        "Adapters",
        "What each adapter gives; [ADAPTERS.md](../ADAPTERS.md) explains them. torchrun finds its adapter by the name "
        "`transport`, TransferQueue and verl by their configuration",
        (
            "transport.adapters.torch: TicketDataset TicketLoader Sample",
            "transport.adapters.torch.tensors: tensors",
            "transport.adapters.ray: start_directory open_rings RayStore",
            "transport.adapters.cosmos_rl: replace_ucxx register payload_context ring_schema",
            "transport.adapters.verl: engine_class register",
            "transport.adapters.verl_manager: Manager",
            "transport.adapters.torchrun.handler: TransportRendezvousHandler",
            "transport.adapters.transferqueue: PayloadTransportStorageManager",
            "transport.adapters.vllm: ShardTrainerInit register",
            "transport.adapters.sglang: address load",
            "transport.adapters.nemo_rl: ShardedTransport",
        ),
    ),
    "adapters_payloads": (
        "Adapters: their structures as payloads",
        "What is written for a framework's own structures, and what they are made of again; [TORCH.md](../TORCH.md), "
        "[VERL.md](../VERL.md) and [COSMOS_RL.md](../COSMOS_RL.md) explain it",
        (
            "transport.adapters.torch: collate",
            "transport.adapters.torch.tensor_dicts: payload_of tensordict_of",
            "transport.adapters.verl.data: payload_of data_proto_of",
            "transport.adapters.cosmos_rl.structures: payload_of structure_of",
        ),
    ),
    "testing": (
        "For your own tests",
        "A ring, a client and a queue without UCX, and the leak check",
        ("transport.testing: LocalTransport MemoryQueue a_ticket ResourceSnapshot mark_descendants run",),
    ),
    "errors": ("Errors", "Every error, whether to try again, and what it says", ()),
}

# Bases of SharedRingBuffer: those of the first are on its own page, those of the second on the next.
_PARTS = {
    "transport.SharedRingBuffer": {"transport.ring.life", "transport.ring.attachment"},
    "transport.UCXXClient": {"transport.claims.calls"},
    "transport.UCXXRolloutMixin": {"transport.packer.writing"},
    "transport.claims.in_place.TakenPayloads": set(),
}


def pages() -> dict[Path, str]:
    """Every page with its text."""
    index = HEAD + "| page | what it describes | names |\n|---|---|---|\n"
    made: dict[Path, str] = {}
    for name, (title, purpose, groups) in PAGES.items():
        names = [
            (module, each) for module, _, words in (group.partition(": ") for group in groups) for each in words.split()
        ]
        own = [_section(module, each) for module, each in names] if names else [_errors()]
        made[ROOT / "docs" / "api" / f"{name}.md"] = (
            f"# {title}\n\n{purpose}. [API.md](../API.md) lists the other pages.\n\n" + "\n".join(own).rstrip() + "\n"
        )
        listed = ", ".join(f"`{each}`" for _, each in names) or "`transport.errors`"
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", purpose)
        index += f"| [{title}](api/{name}.md) | {plain} | {listed} |\n"
    return {ROOT / "docs" / "API.md": index, **made}


def described() -> set[tuple[str, str]]:
    """Module and name of everything that has its part."""
    return {
        (module, each)
        for _, _, groups in PAGES.values()
        for module, _, words in (group.partition(": ") for group in groups)
        for each in words.split()
    }


def public() -> Iterator[tuple[str, Any]]:
    """What is public: its title on the page, and the thing itself; of adapters that need a framework, None."""
    yield from ((name, getattr(transport, name)) for name in sorted(transport.__all__))
    modules = [(prefetch, ("FetchedBatch", "FetchedItem"))]
    modules += [(module, tuple(module.__all__)) for module in (queue, store, rendezvous, cooldown, testing)]
    for module, names in (*modules, (trace, ("Trace", "merge")), (config, ("load", "configuration"))):
        yield from ((f"{module.__name__}.{name}", getattr(module, name)) for name in names)
    titles = {f"{module.__name__}.{name}" for module, names in modules for name in names}
    for home, name in sorted(described()):
        title = f"{home}.{name}"
        if home in ("transport", "transport.config", "transport.client.trace") or title in titles:
            continue
        try:
            yield title, getattr(importlib.import_module(home), name)
        except (ImportError, errors.MissingDependencyError):
            yield title, None


def public_calls() -> Iterator[tuple[str, str]]:
    """Title and name of every public call; a class that is made by a call of its own has one named like itself."""
    for title, thing in public():
        if inspect.isclass(thing):
            if "__init__" in vars(thing):
                yield title, title.rpartition(".")[2]
            yield from ((title, name) for name, member in _members(thing, title) if not isinstance(member, property))
        elif callable(thing) or thing is None:
            yield title, title.rpartition(".")[2]


class _Raw:
    """An annotation that shows as it was written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _section(module: str, name: str) -> str:
    title = f"{module}.{name}" if module != "transport" else name
    if module.startswith("transport.adapters."):
        return f"## {title}\n\n" + "\n".join(_from_source(module, name))
    thing = getattr(importlib.import_module(module), name)
    if not callable(thing):
        entries = [_block(f"{name} = {thing!r}", "")]
    elif not inspect.isclass(thing):
        entries = [_entry(name, thing)]
    else:
        own = inspect.getdoc(thing) if "__doc__" in vars(thing) else ""
        made = _signature(thing) if "__init__" in vars(thing) else ""
        entries = [_block(f"{name}{made}", own or "")]
        entries += [_entry(member, found) for member, found in _members(thing, f"{module}.{name}")]
    return f"## {title}\n\n" + "\n".join(entries)


def _from_source(module: str, name: str) -> list[str]:
    """The entries of a name whose module cannot be imported without its framework."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and name in [alias.name for alias in each.names]:
            return _from_source(each.module or "", name)
    [node] = [each for each in tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == name]
    if isinstance(node, ast.FunctionDef):
        return [_written(node)]
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    made = [_arguments(each) for each in functions if each.name == "__init__"]
    documented = [each for each in functions if not each.name.startswith("_") and ast.get_docstring(each)]
    return [_block(name + "".join(made), ast.get_docstring(node) or ""), *map(_written, documented)]


def _written(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
        return _block(node.name, ast.get_docstring(node) or "")
    gives = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return _block(f"{kind}{node.name}{_arguments(node)}{gives}".removesuffix(" -> None"), ast.get_docstring(node) or "")


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return re.sub(r"^\((self|cls)(, )?", "(", f"({ast.unparse(node.args)})")


def _members(thing: type, title: str) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class defines, in its order; then those of bases without a section."""
    parts = _PARTS.get(title if title.startswith("transport.") else f"transport.{title}", set())
    bases = [base for base in thing.__mro__[1:] if base.__module__ in parts]
    seen: set[str] = set()
    for kind in (thing, *bases):
        for name, member in vars(kind).items():
            public = isinstance(member, FunctionType | classmethod | staticmethod | property)
            if public and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, member


def _entry(name: str, member: Any) -> str:
    if isinstance(member, property):
        return _block(name, inspect.getdoc(member) or "")
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    kind = "async " if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) else ""
    return _block(f"{kind}{name}{_signature(function)}", inspect.getdoc(function) or "")


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    kept = [
        each.replace(annotation=_raw(each.annotation))
        for name, each in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    shown = str(signature.replace(parameters=kept, return_annotation=_raw(signature.return_annotation)))
    shown = re.sub(r"<(?:built-in )?function (\S+)(?: at \w+)?>", r"\1", shown)  # an address differs from run to run
    return re.sub(r"= Settings\(.*?\)(?=[,)])", "= DEFAULTS", shown).removesuffix(" -> None")


def _raw(annotation: Any) -> Any:
    return _Raw(annotation) if isinstance(annotation, str) else annotation


def _block(signature: str, docstring: str) -> str:
    """A signature and its docstring, whose lists of arguments and errors show as they are written."""
    lines = textwrap.wrap(signature, 112, subsequent_indent="        ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(["```text", *lines, *(["", docstring] if docstring else []), "```", ""])


def _errors() -> str:
    lines = ["## transport.errors\n", "| error | of | try again | what it says |", "|---|---|---|---|"]
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.TransportError):
            says = " ".join((kind.__doc__ or "").split()).partition(". ")[0].rstrip(".")
            base = "" if kind is errors.TransportError else f"`{kind.__mro__[1].__name__}`"
            lines.append(f"| `{kind.__name__}` | {base} | {'yes' if kind.retryable else 'no'} | {says} |")
    return "\n".join(lines) + "\n"
