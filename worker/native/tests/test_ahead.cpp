// What a thread asks for ahead of a launch: the lines of its own units, in the order that they are read in.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../src/ahead.h"
#include "check.h"

namespace {

using namespace pagecast;

alignas(64) const std::byte kMemory[64 * 1024] = {};

struct Looked {
  std::vector<int64_t> lines;  // bytes from kMemory
  int num_looks = 0;
};

Looked look_all(WeightsAhead ahead) {
  Looked looked;
  bool is_more = true;
  while (is_more) {
    const size_t before = looked.lines.size();
    is_more = ahead.look([&](const std::byte* line) { looked.lines.push_back(line - kMemory); });
    CHECK(looked.lines.size() - before <= kBytesPerLook / kCacheLine, "a long look");
    ++looked.num_looks;
  }
  CHECK(!ahead.look([](const std::byte*) {}), "more after the end");
  return looked;
}

void test_lines_of_own_units() {
  const std::vector<WeightStream> streams{{kMemory, 320, 0, 100}};
  const Looked looked = look_all({streams, 3, 10, 1 << 20});
  CHECK(looked.lines.size() == 7 * 5 && looked.num_looks == 3, "%zu lines", looked.lines.size());
  for (size_t i = 0; i < looked.lines.size(); ++i)
    CHECK(looked.lines[i] == 3 * 320 + static_cast<int64_t>(i) * 64, "line %zu", i);
  CHECK(look_all({streams, 3, 10, 640}).lines.size() == 10, "more than the most");
  CHECK(look_all({streams, 4, 4, 640}).lines.empty(), "units that are none");
  CHECK(look_all({streams, 98, 200, 1 << 20}).lines.size() == 10, "beyond the stream");
  CHECK(look_all(WeightsAhead()).lines.empty(), "nothing to look at");
}

// Gate and up are read unit by unit.
void test_streams_side_by_side() {
  const std::vector<WeightStream> streams{{kMemory, 128, 0, 8}, {kMemory + 8 * 128, 128, 0, 8}};
  const Looked looked = look_all({streams, 2, 4, 1 << 20});
  CHECK((looked.lines == std::vector<int64_t>{256, 320, 1280, 1344, 384, 448, 1408, 1472}), "%zu lines",
        looked.lines.size());
}

// The parts of a stack follow each other.
void test_streams_one_after_the_other() {
  const std::vector<WeightStream> streams{{kMemory, 64, 0, 4}, {kMemory + 4096, 192, 4, 4}};
  const Looked looked = look_all({streams, 3, 5, 1 << 20});
  CHECK((looked.lines == std::vector<int64_t>{192, 4096, 4160, 4224}), "%zu lines", looked.lines.size());
}

}  // namespace

int main() {
  test_lines_of_own_units();
  test_streams_side_by_side();
  test_streams_one_after_the_other();
  return report();
}
