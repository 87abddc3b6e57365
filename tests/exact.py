"""The exact optimum of small schedules: every order of kernels and of transfers at once, as a constraint program.

The rules are those of the simulator: a rank computes one kernel at a time and does not interrupt it; its wire carries
one transfer at a time each way; a transfer holds the sender's way out and the receiver's way in. Every piece goes
straight from the rank that has it to the rank that needs it. Times are whole numbers. Kernels and additions cost nothing
per call here, so that calls taken together and calls taken apart are alike.
"""

from dataclasses import dataclass
from itertools import product

from ortools.sat.python import cp_model

from flashoverlap.flow import FLOWS


@dataclass
class Instance:
    """A flow on ``len(speeds)`` ranks, pieces in ``splits`` parts.

    A part takes ``seconds`` in every kernel, ``adds`` for each partial that is added, and ``moves`` on the wire, times
    the larger of the two ranks' ``slowness``; a weight gradient takes ``seconds`` a part.
    """

    op: str
    slowness: tuple[int, ...]
    splits: int
    seconds: int
    moves: int
    adds: int = 0

    def __post_init__(self):
        self.flow, self.n = FLOWS[self.op], len(self.slowness)
        self.model = cp_model.CpModel()
        self.horizon = 8 * self.n * self.n * self.splits * (self.seconds + self.moves * max(self.slowness) + self.adds)
        self.busy = {}  # resource -> intervals
        self.ends = []

    def task(self, seconds, resources, after):
        """A task on ``resources`` that starts once the tasks ``after`` have ended; returns its end."""
        start = self.model.new_int_var(0, self.horizon, "")
        for resource in resources:
            interval = self.model.new_fixed_size_interval_var(start, seconds, "")
            self.busy.setdefault(resource, []).append(interval)
        for other in after:
            self.model.add(start >= other)
        self.ends.append(start + seconds)
        return start + seconds

    def compute(self, rank, seconds, after):
        return self.task(seconds, [("program", rank)], after)

    def transfer(self, source, target, after):
        seconds = self.moves * max(self.slowness[source], self.slowness[target])
        return [self.task(seconds, [("out", source), ("in", target)], after)]

    def gathered(self, rank):
        """For each part of a gathered letter, what ``rank`` has to wait for."""
        parts = product(range(self.n), range(self.splits))
        return {part: self.transfer(part[0], rank, []) if part[0] != rank else [] for part in parts}

    def add_rank(self, rank, partials):
        """All that ``rank`` does but for the sums; notes in ``partials`` what each sum waits for."""
        flow, parts = self.flow, list(product(range(self.n), range(self.splits)))
        first = self.gathered(rank) if flow.gather else {part: [] for part in parts}
        extra = self.gathered(rank) if flow.extra else first
        by_kernel = {0: []}
        for owner, split in parts:
            after = first[owner, split]
            for index in range(len(flow.kernels)):
                after = [self.compute(rank, self.seconds, after)]
                by_kernel.setdefault(index + 1, []).extend(after)
            if flow.reduce:
                flies = self.transfer(rank, owner, after) if rank != owner else after
                partials.setdefault((owner, split), []).extend(flies)
        for w in flow.wgrads:
            reads = first if w.reads == flow.letters[0] else extra if w.reads else {}
            waits = [end for ends in reads.values() for end in ends] + by_kernel[w.after]
            self.compute(rank, self.seconds * len(parts), waits)

    def add_sums(self, partials):
        for (owner, _), ends in partials.items():
            own, others = ends[owner], [end for rank, end in enumerate(ends) if rank != owner]
            sums = [self.compute(owner, self.adds, [own, end]) for end in others] if self.adds else ends
            if self.flow.reduce == "all_reduce":
                for rank in range(self.n):
                    if rank != owner:
                        self.transfer(owner, rank, sums)

    def solve(self, limit_s=5.0):
        """The least makespan of any order: what no order can beat, and what the best order found takes."""
        partials = {}
        for rank in range(self.n):
            self.add_rank(rank, partials)
        self.add_sums(partials)
        for intervals in self.busy.values():
            self.model.add_no_overlap(intervals)
        makespan = self.model.new_int_var(0, self.horizon, "makespan")
        for end in self.ends:
            self.model.add(makespan >= end)
        self.model.minimize(makespan)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
        solver.parameters.max_time_in_seconds = limit_s
        status = solver.solve(self.model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return solver.best_objective_bound, solver.objective_value
