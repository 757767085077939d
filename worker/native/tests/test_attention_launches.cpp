// Attention launches side by side in one program: what they share of a run, and what they must not.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention_case.h"
#include "check.h"

namespace {

using pagecast::KvShape;
using pagecast::Program;
using pagecast::Team;

// Two launches in one program, those of the second with any lengths.
struct Pair {
  Pair(Team& team, AttentionCase& a, AttentionCase& b, AttentionCase::Lengths lengths_of_b)
      : a(a), b(b), program(team, a.num_tokens(), static_cast<int64_t>(a.rows.size()), nullptr) {
    a.add_to(program, arena_a, a.lengths());
    b.add_to(program, arena_b, lengths_of_b);
  }

  void run() {
    for (auto* arena : {&arena_a, &arena_b})
      std::fill(arena->begin() + static_cast<int64_t>(arena->size() / 2), arena->end(), kNaN);
    program.run({a.num_tokens(), static_cast<int64_t>(a.rows.size()), 0});
  }

  static bool has(const std::vector<float>& arena, const std::vector<float>& results) {
    return std::equal(results.begin(), results.end(), arena.begin() + static_cast<int64_t>(arena.size() / 2),
                      arena.end());
  }

  AttentionCase& a;
  AttentionCase& b;
  std::vector<float> arena_a = a.arena(), arena_b = b.arena();
  Program program;
};

void check_pair(AttentionCase& a, AttentionCase& b, AttentionCase::Lengths lengths_of_b, const char* what) {
  const std::vector<float> alone_a = a.run(1, nullptr), alone_b = b.run(1, nullptr);
  for (int num_threads = 1; num_threads <= 4; ++num_threads) {
    Team team(num_threads);
    Pair pair(team, a, b, lengths_of_b);
    for (int run = 0; run < 2; ++run) {
      pair.run();
      CHECK(Pair::has(pair.arena_a, alone_a), "%s: the first, run %d of %d threads", what, run, num_threads);
      CHECK(Pair::has(pair.arena_b, alone_b), "%s: the second, run %d of %d threads", what, run, num_threads);
    }
  }
}

// More runs than there are splits at once: a run must leave nothing behind for the next.
void test_split_rows_run_again_and_again() {
  const std::vector<std::vector<TestRow>> batches = {{{1, 65}}, {{1, 700}}, {{1, 300}, {1, 129}}};
  for (const KvShape& shape : {KvShape{16, 16, 4, 2}, KvShape{32, 32, 3, 3}})
    for (const auto& rows : batches) {
      AttentionCase a(shape, rows), b(shape, rows, {7, 9});
      const std::vector<float> alone_a = a.run(1, nullptr), alone_b = b.run(1, nullptr);
      for (int num_threads = 2; num_threads <= 4; ++num_threads) {
        Team team(num_threads);
        Pair pair(team, a, b, a.lengths());
        for (int run = 0; run < 40; ++run) {
          pair.run();
          CHECK(Pair::has(pair.arena_a, alone_a), "the first, run %d of %d threads", run, num_threads);
          CHECK(Pair::has(pair.arena_b, alone_b), "the second, run %d of %d threads", run, num_threads);
        }
      }
    }
}

void test_launches_that_differ_in_one_thing() {
  const KvShape shape = {16, 16, 4, 2};
  AttentionCase a(shape, {{2, 300}, {1, 700}});
  AttentionCase contexts(shape, {{2, 700}, {1, 300}}, {5, 6});
  check_pair(a, contexts, {contexts.context_len.data(), a.query_start.data()}, "context_len");
  AttentionCase starts(shape, {{1, 300}, {2, 700}}, {5, 6});
  check_pair(a, starts, {a.context_len.data(), starts.query_start.data()}, "query_start");
  AttentionCase heads({16, 16, 4, 4}, a.rows, {5, 6});
  check_pair(a, heads, a.lengths(), "KV heads");
}

void test_a_narrower_block_table_is_checked_by_itself() {
  const KvShape shape = {16, 16, 4, 2};
  AttentionCase wide(shape, {{1, 700}}), narrow(shape, {{1, 96}});
  Team team(2);
  Pair pair(team, wide, narrow, wide.lengths());
  try {
    pair.run();
    CHECK(false, "700 tokens in the blocks of 96 were not refused");
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find("context_len: 700 in row 0") == 0, "%s", error.what());
  }
  wide.context_len[0] = 96;
  pair.run();
  CHECK(Pair::has(pair.arena_b, narrow.run(1, nullptr)), "what fits both");
}

}  // namespace

int main() {
  test_split_rows_run_again_and_again();
  test_launches_that_differ_in_one_thing();
  test_a_narrower_block_table_is_checked_by_itself();
  return report();
}
