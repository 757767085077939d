"""The scheduler, its pool and its sessions, driven through anything that may happen by one seed.

PagedSessionScheduler, BlockPool and Session are the real ones. In place of engine and model stands a
machine that takes random commands, runs a model of hashes and checks every promise around every step.
All chance comes from one `random.Random(seed)`, so a seed that fails replays exactly:

    python -m tests.worker.simulator --seed 17
    python -m tests.worker.simulator --num-seeds 3500
    python -m tests.worker.simulator --steps 1000000
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.worker.simulator_checks import StepCheck
from tests.worker.simulator_model import require
from tests.worker.simulator_world import Client, Kinds, World
from worker.batch import Batch

STEPS = 100
_MAX_DRAIN_STEPS = 20_000


class Machine(World):
    """What an engine does with a scheduler, step by step."""

    def run(self, num_steps: int = STEPS) -> Counter[str]:
        """So many steps under random commands, then all turns to their ends, then everything closed.

        Returns:
            How often what happened, `steps` among it.

        Raises:
            Violation: Something did not hold that has to.
        """
        for _ in range(num_steps):
            self.command()
            self.step()
        while self._lent:
            self._take_back()
        for _ in range(_MAX_DRAIN_STEPS):
            if not self._scheduler.has_work:
                break
            self.step()
        require(not self._scheduler.has_work, "turns don't come to an end")
        for client in self._clients.values():
            self._scheduler.close(client.session)
        self._clients.clear()
        self.check()
        every = self._allocate(self._pool.num_blocks)
        require(sorted(every) == list(range(self._pool.num_blocks)), "the pool is not whole at the end")
        return self.counts

    def step(self) -> None:
        """Schedule, run, commit, end the turns that are over; all of it checked."""
        self.counts["steps"] += 1
        sessions = {name: client.session for name, client in self._clients.items()}
        to_start = {
            name for name, each in sessions.items() if each.generation and not each.generation.is_started
        }
        num_injected = self.counts["failed allocations"]
        before = StepCheck(
            self._scheduler,
            sessions,
            {name: client.alone for name, client in self._clients.items()},
            [lent.blocks for lent in self._lent],
            has_token_classes=self._has_classes,
        )
        batch = self._scheduler.schedule()
        has_injected = self.counts["failed allocations"] > num_injected
        before.check(batch, has_injected=has_injected)
        self._note_losses(before.lost(), batch)
        for row in batch.rows:
            if row.session_id in to_start:
                self._check_start(self._clients[row.session_id], row.position)
        self._run(batch)
        if not batch.rows and (first := self._scheduler.first_turn()) is not None:
            self.counts["refused blocks" if has_injected else "exhausted"] += 1
            self._end(self._clients[first.session_id], keep=False)
        self.check()

    def _note_losses(self, lost: Iterable[str], batch: Batch) -> None:
        rows = {row.session_id: row for row in batch.rows}
        for name in lost:
            client = self._clients[name]
            client.has_lost_kv = True
            client.alone.is_whole = False
            if client.session.generation is None:
                self.counts["reclaimed"] += 1
            elif name in rows and rows[name].position:
                self.counts["unshared"] += 1
            else:
                self.counts["preempted"] += 1

    def _check_start(self, client: Client, position: int) -> None:
        """A turn tells how much of the earlier log has KV: all that was due, unless it was taken."""
        turn, alone = client.session.generation, client.alone
        if turn is None:
            return
        due = min(alone.due, len(alone.ids) - 1)
        told = turn.cached_tokens, turn.reprefilled_tokens
        require(turn.is_started, "a turn has a row and is not started")
        require(told == (position, max(due - position, 0)), f"(cached, computed again) is {told}, due {due}")
        if alone.is_whole:
            require(position == due, f"{position} earlier tokens at hand, not {due}")
            self.counts["cached"] += due > 0
        self.counts["computed again"] += turn.reprefilled_tokens > 0

    def _run(self, batch: Batch) -> None:
        tokens = self._model.run(batch, {name: client.alone for name, client in self._clients.items()})
        of_row = iter(tokens)
        drawn: list[int | None] = []
        failed = []
        for row in batch.rows:
            client = self._clients[row.session_id]
            if not row.wants_logits:
                drawn.append(None)
                continue
            token = next(of_row)
            if self._rng.random() < self._nan_rate:
                self._model.spoil(row)
                failed.append((client, client.session.num_computed))
                drawn.append(None)
            else:
                client.alone.draw()
                drawn.append(token)
        require(next(of_row, None) is None, "more tokens than rows that want one")
        for row, committed in zip(batch.rows, drawn, strict=True):
            self._scheduler.commit(row, committed)
        self.counts["rows"] += len(batch.rows)
        self.counts["mixed steps"] += len({row.token_class for row in batch.rows}) > 1
        for client, num_computed in failed:
            as_before = (client.session.num_computed, client.session.token_ids) == (
                num_computed,
                client.alone.ids,
            )
            require(as_before, "a row that failed moved its session on")
            self._fail(client)
        for row in batch.rows:
            client = self._clients[row.session_id]
            session, turn = client.session, client.session.generation
            if turn is None:
                continue
            require(session.num_computed == row.context_len, f"{row.session_id}: other KV than its row left")
            if self._scheduler.is_appended(session):
                self._end_whole(client, session.num_tokens)
            elif not turn.appends_only and (
                session.num_generated >= client.max_tokens or session.num_tokens == session.max_context_tokens
            ):
                self._end_whole(client, session.num_tokens - 1)

    def _end_whole(self, client: Client, due: int) -> None:
        """A turn that was not cut leaves KV of all but the last drawn token."""
        self._end(client, keep=True)
        require(client.session.num_computed == client.session.num_due == due, "a turn ends with KV missing")
        client.alone.is_whole = True

    def _fail(self, client: Client) -> None:
        freed = self._scheduler.fail(client.session)
        require(not client.session.block_table, "a failed session still has KV")
        require(all(self._pool.num_holders(block) == 0 for block in freed), "a failed turn's block is held")
        self._model.zero(freed)
        client.alone.roll_back()
        client.alone.is_whole = False
        self.counts["failed"] += 1


def simulate(
    seed: int,
    *,
    steps: int = STEPS,
    kinds: Kinds | None = None,
    fail_rate: float | None = None,
    failing_allocation: int = 0,
) -> Counter[str]:
    """One seed from its start to its end; an exception names the seed and how to replay it."""
    try:
        machine = Machine(seed, kinds, fail_rate=fail_rate, failing_allocation=failing_allocation)
        return machine.run(steps)
    except Exception as error:
        error.add_note(f"replay: python -m tests.worker.simulator --seed {seed}")
        raise


def main(arguments: list[str] | None = None) -> int:
    """Run seeds from the command line and tell how many steps, how fast, and what did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.worker.simulator", description=simulate.__doc__)
    parser.add_argument("--seed", type=int, help="run this seed alone and show what it fails with")
    parser.add_argument("--from-seed", type=int, default=0, metavar="N", help="the first of many seeds")
    parser.add_argument("--num-seeds", type=int, default=3500, metavar="N", help="how many")
    parser.add_argument("--steps", type=int, metavar="N", help="as many seeds as so many steps take, instead")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        sys.stdout.write(f"seed {chosen.seed}: {dict(simulate(chosen.seed))}\n")
        return 0
    first = chosen.from_seed
    total: Counter[str] = Counter()
    num_seeds = num_violations = 0
    started_s = time.monotonic()
    for seed in itertools.count(first) if chosen.steps else range(first, first + chosen.num_seeds):
        try:
            total += simulate(seed)
        except Exception as error:  # noqa: BLE001  whatever it is, the seed is told and the others run
            num_violations += 1
            sys.stdout.write(f"seed {seed}: {type(error).__name__}: {error}\n")
        num_seeds += 1
        if chosen.steps and total["steps"] >= chosen.steps:
            break
    took_s = time.monotonic() - started_s
    sys.stdout.write(
        f"{num_seeds} seeds, {total['steps']} steps, {took_s:.1f} s, {total['steps'] / took_s:.0f} steps/s, "
        f"{num_violations} violations\n{dict(total)}\n"
    )
    return 1 if num_violations else 0


if __name__ == "__main__":
    sys.exit(main())
