"""Divide a run among the nodes of a cluster.

Only the driver uses the run directory. It lists, sends the tables of each part to a node, and
publishes the results. Nodes share only the stores. If a node or process is lost, its part is done
again on another node.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
import threading
import time
from collections import defaultdict, deque
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from hicachectl.formats.errors import StoreUnavailable
from hicachectl.io.interrupts import deferred
from hicachectl.parts.cluster import Cluster, LostError, StoppedError
from hicachectl.parts.directory import RunDirectory
from hicachectl.parts.manifest import MOST_PARTS, dump
from hicachectl.parts.messages import (
    Moved,
    Order,
    Outcome,
    Piece,
    result_from,
    table_bytes,
    table_from,
)
from hicachectl.parts.results import mark_merged, merge_run
from hicachectl.parts.running import begin, run_part
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractContextManager

    from hicachectl.parts.cluster import Node
    from hicachectl.parts.job import Job, PartInput
    from hicachectl.parts.manifest import Manifest
    from hicachectl.parts.records import StageResult
    from hicachectl.parts.running import Say
    from hicachectl.results import Result

    # Opens the stores of a job on a node; picklable.
    OpenJob = Callable[[], AbstractContextManager[Job]]

ATTEMPTS = 3  # at a part, on different nodes if possible
# Objects of a part. The first bounds what travels at once. Fewer than the second are not worth a
# process, if each node has one.
_MOST_OBJECTS = 100_000
_FEW_OBJECTS = 1_000
_PARTS_PER_WORKER = 4  # so that one slow part delays the end little
_LOOK_SECONDS = 0.2
_STOP_SECONDS = 60.0


class Driver:
    """A run on a cluster; a context manager.

    Call `begin`, then `work`, then `merged`; use its result within the block.
    """

    def __init__(
        self,
        address: str,
        job: Job,
        open_job: OpenJob,
        *,
        workers: int | None = None,
        path: Path | None = None,
        say: Say = lambda text: None,
    ) -> None:
        """Connect to the cluster, and ask each node whether it can open the job.

        job: open here. open_job: opens an equal job on a node. workers: parts at once, on all nodes
        together; None: one on each node. path: run directory; None: a temporary one. say: takes
        remarks. Raises UsageError, and StoreUnavailable if there is no cluster or no node can work.
        """
        self._job = job
        self._say = say
        self._cluster_stack = ExitStack()
        self._stack = ExitStack()
        self._stack.enter_context(self._cluster_stack)
        try:
            cluster = self._cluster_stack.enter_context(Cluster(address))
            nodes = cluster.nodes()
            self._stages = _Stages(cluster, open_job, workers or len(nodes))
            able = self._able(nodes, address)
            self._stages.workers = workers or len(able)
            self._stages.parts_here = -(-self._stages.workers // len(able))
            self._nodes = _Nodes(able, self._stages.parts_here)
            if path is None:
                path = Path(tempfile.mkdtemp(prefix="hicachectl-run-"))
                self._stack.callback(shutil.rmtree, path, ignore_errors=True)
            self._run = self._stack.enter_context(
                RunDirectory.create(path, job.permissions, job.trust)
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect, and remove a temporary run directory."""
        with deferred():
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def workers(self) -> int:
        """Number of parts at once."""
        return self._stages.workers

    def begin(self, on_listed: Callable[[int], None] = lambda objects: None) -> None:
        """List and plan, unless an earlier driver has. on_listed: see `running.begin`."""
        self._manifest = begin(self._run, self._job, self._count, on_listed=on_listed)

    def work(self, on_progress: Callable[[int, int], None] = lambda new, total: None) -> None:
        """Do all parts; then disconnect.

        on_progress: takes new and total bytes. Raises UsageError, FormatError, StoreUnavailable if
        no node is left, and as the methods of the job.
        """
        try:
            work = _Work(self._run, self._job, self._manifest, self._stages, self._nodes, self._say)
            work.run(on_progress)
        finally:
            self._cluster_stack.close()

    def merged(self) -> Result:
        """Return the result of the run."""
        return merge_run(self._run)

    def mark_merged(self) -> None:
        """Record that the outcome was written."""
        mark_merged(self._run)

    def _count(self, objects: int) -> int:
        """Return the number of parts for a number of objects."""
        useful = min(_PARTS_PER_WORKER * self._stages.workers, objects // _FEW_OBJECTS)
        count = max(self._stages.workers, useful, -(-objects // _MOST_OBJECTS))
        return min(count, MOST_PARTS)

    def _able(self, nodes: list[Node], address: str) -> list[Node]:
        """Return the nodes that can work; name the others. Raises StoreUnavailable if none can."""
        refusals = self._stages.refusals(nodes)
        for node, reason in refusals.items():
            self._say(f"Node {node.name} is left out: {reason}")
        able = [node for node in nodes if node not in refusals]
        if not able:
            reason = (
                f"{counted(len(nodes), 'node')} left out; see above why"
                if nodes
                else "none has a CPU for tasks; start one with --num-cpus"
            )
            raise StoreUnavailable(f"--ray {address}: no node of the cluster can work: {reason}")
        return able


class _Nodes:
    """Nodes in use, with the number of parts that each one does. Used by several threads."""

    def __init__(self, nodes: Collection[Node], most: int) -> None:
        self._busy = dict.fromkeys(nodes, 0)
        self._most = most
        self._changed = threading.Condition()

    def take(self, avoided: Collection[Node], stopped: Callable[[], bool]) -> Node:
        """Wait for a node with room, one that is not avoided if there is any.

        Raises StoreUnavailable if no node is left, StoppedError.
        """
        with self._changed:
            while not stopped():
                if not self._busy:
                    raise StoreUnavailable(
                        "No node is left that can work; see above why, then run again"
                    )
                wanted = [node for node in self._busy if node not in avoided] or [*self._busy]
                node = min(wanted, key=self._busy.__getitem__)
                if self._busy[node] < self._most:
                    self._busy[node] += 1
                    return node
                self._changed.wait(_LOOK_SECONDS)
        raise StoppedError

    def give(self, node: Node) -> None:
        """Record that a part has ended on a node."""
        with self._changed:
            if node in self._busy:
                self._busy[node] -= 1
                self._changed.notify()

    def drop(self, node: Node) -> bool:
        """Use a node no more; return whether it was in use."""
        with self._changed:
            self._changed.notify_all()
            return self._busy.pop(node, None) is not None


class _Stages:
    """Stages of a job's parts, done on nodes.

    workers: number of parts at once, which divides limits.
    parts_here: the largest number of these on one node.
    """

    def __init__(self, cluster: Cluster, open_job: OpenJob, workers: int) -> None:
        self._cluster = cluster
        self._job = pickle.dumps(open_job)
        self._began = time.monotonic()
        self.workers = workers
        self.parts_here = 1

    def refusals(self, nodes: Collection[Node]) -> dict[Node, str]:
        """Return why nodes cannot work."""
        return self._cluster.refusals(nodes, self._job)

    def do(
        self,
        node: Node,
        stopped: Callable[[], bool],
        given: PartInput,
        on_progress: Callable[[int, int], None],
    ) -> StageResult:
        """Do the work of a part. Exceptions as in `Cluster.answers`."""
        order = Order(
            stage="work",
            job=self._job,
            manifest=dump(given.manifest),
            part=given.part,
            owner=given.owner,
            divided=self.workers,
            parts_here=self.parts_here,
            age=given.age(),
            spent=time.monotonic() - self._began,
            tables={name: table_bytes(read()) for name, read in given.tables.items()},
        )
        pieces: dict[str, list[pa.Table]] = defaultdict(list)
        outcome: Outcome | None = None
        with closing(self._cluster.answers(node, order, stopped)) as answers:
            for answer in answers:
                match answer:
                    case Moved(new, total):
                        on_progress(new, total)
                    case Piece(table, content):
                        pieces[table].append(table_from(content))
                    case Outcome():
                        outcome = answer
        if outcome is None:
            raise LostError("the process ended without a result")
        tables = {name: pa.concat_tables(of_table) for name, of_table in pieces.items()}
        return result_from(outcome, tables)


class _Progress:
    """Bytes done, and an estimate of the total, which each part tells when it begins."""

    def __init__(self, parts: int, report: Callable[[int, int], None]) -> None:
        self._parts = parts
        self._report = report
        self._done: dict[int, int] = {}
        self._totals: dict[int, int] = {}

    def moved(self, part: int, new: int, total: int) -> None:
        self._done[part] = self._done.get(part, 0) + new
        self._totals[part] = total
        known = sum(self._totals.values())
        self._report(new, known * max(self._parts, len(self._totals)) // len(self._totals))

    def lost(self, part: int) -> None:
        """Subtract the progress of a lost attempt."""
        if part in self._totals:
            self.moved(part, -self._done[part], self._totals[part])

    def done_before(self) -> None:
        self._parts -= 1


class _Work:
    """Parts to do, by threads that each wait for one part at a time."""

    def __init__(
        self,
        run: RunDirectory,
        job: Job,
        manifest: Manifest,
        stages: _Stages,
        nodes: _Nodes,
        say: Say,
    ) -> None:
        self._run = run
        self._job = job
        self._manifest = manifest
        self._stages = stages
        self._nodes = nodes
        self._say_now = say
        self._todo = deque(range(manifest.parts))
        self._lost_on: dict[int, list[Node]] = defaultdict(list)
        self._stopped = threading.Event()
        self._errors: list[BaseException] = []
        # Calls for the main thread, which alone prints.
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run(self, on_progress: Callable[[int, int], None]) -> None:
        """Do all parts. Raises the first error of any; an interrupt cancels all stages."""
        progress = _Progress(self._manifest.parts, on_progress)
        count = min(self._stages.workers, self._manifest.parts)
        threads = [
            threading.Thread(target=self._do_parts, args=[progress], name="part", daemon=True)
            for _ in range(count)
        ]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                self._call(_LOOK_SECONDS)
            while not self._calls.empty():
                self._call(0)
        finally:
            self._stopped.set()
            with deferred():
                until = time.monotonic() + _STOP_SECONDS
                for thread in threads:
                    if thread.is_alive():
                        thread.join(max(until - time.monotonic(), 0))
        if self._errors:
            raise self._errors[0]

    def _call(self, seconds: float) -> None:
        with suppress(Empty):
            self._calls.get(timeout=seconds)()

    def _say(self, text: str) -> None:
        self._calls.put(partial(self._say_now, text))

    def _do_parts(self, progress: _Progress) -> None:
        """Do parts until none is left.

        A thread that loses a part puts it back and goes on, so no part is left at the end.
        """
        try:
            while not self._stopped.is_set():
                try:
                    part = self._todo.popleft()
                except IndexError:
                    return
                self._do(part, progress)
        except StoppedError:
            pass
        except BaseException as error:
            self._errors.append(error)
            self._stopped.set()

    def _do(self, part: int, progress: _Progress) -> None:
        node = self._nodes.take(self._lost_on[part], self._stopped.is_set)
        try:
            outcome = run_part(
                self._run,
                self._job,
                self._manifest,
                part,
                work=partial(self._stages.do, node, self._stopped.is_set),
                on_progress=lambda new, total: self._calls.put(
                    partial(progress.moved, part, new, total)
                ),
            )
            if outcome.earlier:
                self._calls.put(progress.done_before)
        except LostError as loss:
            self._calls.put(partial(progress.lost, part))
            self._note_loss(part, node, loss)
        finally:
            self._nodes.give(node)

    def _note_loss(self, part: int, node: Node, loss: LostError) -> None:
        """Do a part again, and use its node no more if it cannot work."""
        reason = self._stages.refusals([node]).get(node)
        if reason is not None and self._nodes.drop(node):
            self._say(f"Node {node.name} is left out: {reason}")
        lost_on = self._lost_on[part]
        lost_on.append(node)
        if len(lost_on) < ATTEMPTS:
            self._say(f"Part {part} was lost on {node.name} and is done again: {loss}")
            self._todo.append(part)
        elif loss.error is not None:
            raise loss.error
        else:
            self._say(f"Part {part} was lost {ATTEMPTS} times, at last on {node.name}: {loss}")
