"""Divide a run among the nodes of a cluster.

Only the driver uses the run directory. The driver lists the store, sends the tables of each part to
a node, and publishes the results. Nodes share only the stores. If a node or process is lost, its
part is done again, if possible on another node.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from hicachectl.backends.disk.io import Closing
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.io.interrupts import deferred
from hicachectl.parts.child import Moved, Order, Outcome, Piece, table_bytes, table_from
from hicachectl.parts.cluster import Cluster, LostError, StoppedError
from hicachectl.parts.directory import RunDirectory
from hicachectl.parts.job import StageResult
from hicachectl.parts.manifest import MOST_PARTS
from hicachectl.parts.results import mark_merged, merge_run
from hicachectl.parts.running import begin, run_part
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from hicachectl.parts.cluster import Node
    from hicachectl.parts.job import Job, PartInput, Tables
    from hicachectl.parts.running import Say
    from hicachectl.results import Result

    # Opens the stores of a job on a node; picklable.
    OpenJob = Callable[[], AbstractContextManager[Job]]

ATTEMPTS = 3  # attempts at a part, on different nodes if possible
_MOST_OBJECTS = 100_000  # most objects of a part, which bounds the bytes sent at once
_FEW_OBJECTS = 1_000  # least objects of a part, unless workers would get no part
_PARTS_PER_WORKER = 4  # several, so that one slow part delays the end little
_LOOK_SECONDS = 0.2
_STOP_SECONDS = 60.0


class Driver(Closing):
    """A run on a cluster; a context manager.

    Call `begin`, then `work`, then `merged`. Use the result of `merged` within the block. Each
    thread waits for one part at a time. Only the main thread prints.

    workers: number of parts at once. Limits of the whole run are divided by this number.
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

        job: job that is open in this process.
        open_job: function that opens an equal job on a node.
        workers: number of parts at once, on all nodes together; None for one part on each node.
        path: run directory; None for a temporary directory.
        say: takes remarks.
        Raises UsageError, and StoreUnavailable if there is no cluster or no node can work.
        """
        self._job = job
        self._opens = pickle.dumps(open_job)
        self._say_now = say
        self._lost_on: dict[int, list[Node]] = defaultdict(list)
        self._stopped = threading.Event()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._cluster_stack = ExitStack()
        self._stack = ExitStack()
        self._stack.enter_context(self._cluster_stack)
        try:
            self._cluster = self._cluster_stack.enter_context(Cluster(address))
            self._began = time.monotonic()
            able = self._able(self._cluster.nodes(), address)
            self.workers = workers or len(able)
            self._nodes = _Nodes(able, -(-self.workers // len(able)))
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

    def begin(self, on_listed: Callable[[int], None] = lambda objects: None) -> None:
        """List and plan, unless an earlier driver has done both. on_listed: see `running.begin`."""
        self._manifest = begin(self._run, self._job, self._count, on_listed=on_listed)

    def work(self, on_progress: Callable[[int, int], None] = lambda new, total: None) -> None:
        """Do all parts, and then disconnect. An interrupt cancels all stages.

        on_progress: takes the bytes done since the last call, and an estimate of all bytes.
        Raises the first error of any part: UsageError, FormatError, StoreUnavailable if no node is
        left, or an error of the job's methods.
        """
        try:
            self._do_all(on_progress)
        finally:
            self._cluster_stack.close()

    def merged(self) -> Result:
        """Return the result of the run."""
        return merge_run(self._run)

    def mark_merged(self) -> None:
        """Record that the result of the run was written."""
        mark_merged(self._run)

    def _count(self, objects: int) -> int:
        """Return the number of parts for a number of objects."""
        useful = min(_PARTS_PER_WORKER * self.workers, objects // _FEW_OBJECTS)
        count = max(self.workers, useful, -(-objects // _MOST_OBJECTS))
        return min(count, MOST_PARTS)

    def _able(self, nodes: list[Node], address: str) -> list[Node]:
        """Return the nodes that can work. Say why the other nodes cannot.

        Raises StoreUnavailable if no node can work.
        """
        refusals = self._cluster.refusals(nodes, self._opens)
        for node, reason in refusals.items():
            self._say_now(f"Node {node.name} is left out: {reason}")
        able = [node for node in nodes if node not in refusals]
        if not able:
            reason = (
                f"{counted(len(nodes), 'node')} left out; see the reasons above"
                if nodes
                else "none has a CPU for tasks; start one with --num-cpus"
            )
            raise StoreUnavailable(f"--ray {address}: no node of the cluster can work: {reason}")
        return able

    def _do_all(self, on_progress: Callable[[int, int], None]) -> None:
        parts = self._manifest.parts
        progress = _Progress(parts, on_progress)
        pool = ThreadPoolExecutor(min(self.workers, parts), thread_name_prefix="part")
        running: set[Future[bool]] = set()
        errors: list[BaseException] = []

        def begin(part: int) -> None:
            future = pool.submit(self._do, part, progress)
            running.add(future)
            future.add_done_callback(lambda ended: self._calls.put(partial(end, part, ended)))

        def end(part: int, future: Future[bool]) -> None:
            running.remove(future)
            if (error := future.exception()) is not None:
                errors.append(error)
                self._stopped.set()
            elif not future.result():
                begin(part)

        try:
            for part in range(parts):
                begin(part)
            while running:
                self._calls.get()()
        finally:
            self._stopped.set()
            with deferred():
                pool.shutdown(wait=False, cancel_futures=True)
                wait(running, _STOP_SECONDS)
        if errors:
            raise errors[0]

    def _say(self, text: str) -> None:
        self._calls.put(partial(self._say_now, text))

    def _do(self, part: int, progress: _Progress) -> bool:
        """Do a part on a node. Return False if the part is lost and must be done again."""
        node = self._nodes.take(self._lost_on[part], self._stopped.is_set)
        try:
            outcome = run_part(
                self._run,
                self._job,
                self._manifest,
                part,
                work=partial(self._work_on, node),
                on_progress=lambda new, total: self._calls.put(
                    partial(progress.moved, part, new, total)
                ),
            )
            if outcome.earlier:
                self._calls.put(progress.done_before)
        except LostError as loss:
            self._calls.put(partial(progress.lost, part))
            return self._gives_up(part, node, loss)
        finally:
            self._nodes.give(node)
        return True

    def _gives_up(self, part: int, node: Node, loss: LostError) -> bool:
        """Return whether a lost part is given up. If its node cannot work, use the node no more.

        Raises the error of the last attempt, if this attempt had one.
        """
        reason = self._cluster.refusals([node], self._opens).get(node)
        if reason is not None and self._nodes.drop(node):
            self._say(f"Node {node.name} is left out: {reason}")
        lost_on = self._lost_on[part]
        lost_on.append(node)
        if len(lost_on) < ATTEMPTS:
            self._say(f"Part {part} was lost on {node.name} and is done again: {loss}")
            return False
        if loss.error is not None:
            raise loss.error
        self._say(f"Part {part} was lost {ATTEMPTS} times, at last on {node.name}: {loss}")
        return True

    def _work_on(
        self,
        node: Node,
        given: PartInput,
        tables: Tables,
        on_progress: Callable[[int, int], None],
    ) -> StageResult:
        """Do the work of a part on a node. Raises the errors of `Cluster.answers`."""
        now = time.monotonic()
        given = msgspec.structs.replace(
            given, divided=self.workers, parts_here=self._nodes.most, spent=now - self._began
        )
        order = Order(
            job=self._opens,
            given=given,
            age=now - given.began,
            tables={name: table_bytes(read()) for name, read in tables.items()},
        )
        pieces: dict[str, list[pa.Table]] = defaultdict(list)
        outcome: Outcome | None = None
        with closing(self._cluster.answers(node, order, self._stopped.is_set)) as answers:
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
        results = {name: pa.concat_tables(of_table) for name, of_table in pieces.items()}
        return StageResult(outcome.facts, results, outcome.settled)


class _Nodes:
    """Nodes in use, with the number of parts that each one does. Used by several threads.

    most: number of parts that a node does at once.
    """

    def __init__(self, nodes: Collection[Node], most: int) -> None:
        self._busy = dict.fromkeys(nodes, 0)
        self.most = most
        self._changed = threading.Condition()

    def take(self, avoided: Collection[Node], stopped: Callable[[], bool]) -> Node:
        """Wait for a node that can do one more part. Take an avoided node only if no other is left.

        Raises StoreUnavailable if no node is left. Raises StoppedError.
        """
        with self._changed:
            while not stopped():
                if not self._busy:
                    raise StoreUnavailable(
                        "No node is left that can work; see the reasons above, then run again"
                    )
                wanted = [node for node in self._busy if node not in avoided] or [*self._busy]
                node = min(wanted, key=self._busy.__getitem__)
                if self._busy[node] < self.most:
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
        """Use a node no more. Return whether it was in use."""
        with self._changed:
            self._changed.notify_all()
            return self._busy.pop(node, None) is not None


class _Progress:
    """Bytes done, and an estimate of all bytes.

    The bytes of all parts are not known before all parts have begun.
    """

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
