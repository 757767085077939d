// The launches that multiply with packed weights: what each checks, how it is cut by panels across segments,
// and the rounding of activations in front of it.
#include <algorithm>

#include "program.h"

namespace pagecast {
namespace {

// Rounding to eight bits costs twice what moving does.
constexpr int64_t kQuantiseCost = 2;
constexpr int64_t kRoundCost = 1;

// Panels of all segments, numbered through.
int64_t count_panels(std::span<const Panels> segments) {
  int64_t count = 0;
  for (const Panels& segment : segments) count += segment.num_panels();
  return count;
}

int64_t count_rows(std::span<const Panels> segments) {
  int64_t count = 0;
  for (const Panels& segment : segments) count += segment.num_rows;
  return count;
}

std::vector<WeightStream> streams_of(std::span<const Panels> segments) {
  std::vector<WeightStream> streams;
  int64_t first = 0;
  for (const Panels& segment : segments) {
    streams.push_back({segment.data, segment.panel_bytes(), first, segment.num_panels()});
    first += segment.num_panels();
  }
  return streams;
}

void check_weight(const Checks& checks, std::span<const Panels> segments, const View& x) {
  checks.require(!segments.empty(), "weight", "has no rows");
  for (size_t i = 0; i < segments.size(); ++i) {
    checks.equal("x", "width", x.width, segments[i].num_columns);
    checks.require(i + 1 == segments.size() || segments[i].num_rows % kLanes == 0, "weight",
                   std::to_string(segments[i].num_rows) +
                       " rows of one format before others, must be a "
                       "multiple of " +
                       std::to_string(kLanes));
  }
}

bool same_rows(const View& a, const View& b) {
  return a.arena + a.offset == b.arena + b.offset && a.row_stride == b.row_stride && a.width == b.width &&
         a.extent == b.extent;
}

bool wants_int8(Activations activations, const Panels& segment) {
  return activations == Activations::kInt8 && is_quantised(segment.format);
}

}  // namespace

// A product's segments and its operands, float32.
struct Program::Product {
  std::vector<Panels> segments;
  Rows x;
  Rows out;
  int64_t num_columns;

  // Calls multiply(segment, first, last, out) for the part of panels [first, last) in each segment.
  template <typename Multiply>
  void cut(int64_t first, int64_t last, Multiply&& multiply) const {
    int64_t begin = 0;
    for (const Panels& segment : segments) {
      const int64_t end = begin + segment.num_panels();
      if (first < end && last > begin) {
        multiply(segment, std::max(first, begin) - begin, std::min(last, end) - begin,
                 Rows{out.data + begin * kLanes, out.stride});
      }
      begin = end;
    }
  }
};

Int8Rows Program::Int8Scratch::rows(int64_t num_columns, int offset) const {
  const auto found =
      std::find_if(biases.begin(), biases.end(), [&](const auto& entry) { return entry.first == offset; });
  return {reinterpret_cast<int8_t*>(quants.get()), scales.get(), scaled_sums.get(),
          reinterpret_cast<int32_t*>(found->second.get()), num_columns};
}

void Program::Int8Scratch::reserve(int64_t num_rows, int64_t num_columns, std::span<const int> offsets) {
  const bool grows = num_rows * num_columns > num_elements;
  const int64_t elements = std::max(num_elements, num_rows * num_columns), groups = elements / kGroup;
  std::vector<std::pair<int, Floats>> all;
  for (const int offset : offsets)
    if (std::none_of(biases.begin(), biases.end(), [&](const auto& entry) { return entry.first == offset; }))
      all.emplace_back(offset, make_floats(2 * groups));
  if (grows) {
    for (const auto& [offset, _] : biases) all.emplace_back(offset, make_floats(2 * groups));
    Floats bytes = make_floats(elements / static_cast<int64_t>(sizeof(float)));
    Floats factors = make_floats(groups), sums = make_floats(groups);
    quants = std::move(bytes);
    scales = std::move(factors);
    scaled_sums = std::move(sums);
    biases.clear();
    num_elements = elements;
  }
  for (auto& entry : all) biases.push_back(std::move(entry));
}

BFloat16Rows Program::BFloat16Scratch::rows(int64_t num_columns) const {
  return {reinterpret_cast<uint16_t*>(numbers.get()), num_columns};
}

void Program::BFloat16Scratch::reserve(int64_t num_rows, int64_t num_columns) {
  // Kernels take rows by kLanes.
  const int64_t elements = round_up(num_rows) * BFloat16Rows{nullptr, num_columns}.num_tiles() * kSumColumns;
  if (elements <= num_elements) return;
  numbers = make_floats(elements / 2);
  // What lies behind the rows of a step is multiplied too, for nobody.
  std::fill_n(numbers.get(), elements / 2, 0.0f);
  num_elements = elements;
}

template <typename Round>
void Program::push_before(const View& x, int64_t cost, Round round) {
  if (!launches_.empty() && launches_.back().wrote && same_rows(*launches_.back().wrote, x)) {
    Launch& before = launches_.back();
    before.body = [write = std::move(before.body), round = std::move(round)](const Share& share) {
      write(share);
      round(share);
    };
    before.cost += cost;
    return;
  }
  push(x.extent, 0, cost, std::move(round));
  launches_.back().counts_to_next = true;
}

int Program::round_before(const View& x, std::span<const Panels> segments) {
  if (activations_ == Activations::kBFloat16) {
    // Half a tile would keep what another product left in the other one.
    if (!launches_.empty() && launches_.back().also != nullptr && x.width % kSumColumns == 0 &&
        same_rows(launches_.back().also->out, x)) {
      RoundedToo& also = *launches_.back().also;
      bfloat16_[also.scratch].reserve(capacity_.of(x.extent), x.width);
      also.wanted = true;
      return also.scratch;
    }
    bfloat16_[0].reserve(capacity_.of(x.extent), x.width);
    push_before(x, kRoundCost * x.width, [this, from = x.rows(), width = x.width](const Share& share) {
      kernels_.bfloat16->round(from, share.first, share.last, bfloat16_[0].rows(width));
    });
    return 0;
  }
  std::vector<int> offsets;
  for (const Panels& segment : segments)
    if (wants_int8(activations_, segment) &&
        std::find(offsets.begin(), offsets.end(), segment.offset) == offsets.end())
      offsets.push_back(segment.offset);
  if (offsets.empty()) return 0;
  int8_.reserve(capacity_.of(x.extent), x.width, offsets);
  push_before(x, kQuantiseCost * x.width,
              [this, from = x.rows(), width = x.width, offsets](const Share& share) {
                for (const int offset : offsets)
                  kernels_.int8->quantise(from, offset, share.first, share.last, int8_.rows(width, offset));
              });
  return 0;
}

void Program::embedding(std::span<const Panels> weight, const Array<int32_t>& token_ids, const View& out) {
  const Checks checks = this->checks("embedding");
  checks.require(weight.size() == 1, "weight", "must have one format");
  checks.array("token_ids", token_ids, 1, capacity_.tokens);
  checks.view("out", out, weight[0].num_columns, Extent::kTokens);
  push_rows(out, out.width,
            [kernel = kernels_.embedding, panels = weight[0], ids = token_ids.data,
             to = out.rows()](const Share& share) { kernel(panels, ids, share.first, share.last, to); });
}

void Program::linear(const View& x, std::span<const Panels> weight, const View& out) {
  const Checks checks = this->checks("linear");
  checks.view("x", x);
  check_weight(checks, weight, x);
  checks.view("out", out, count_rows(weight), x.extent);
  checks.apart("out", out, "x", x);
  const int scratch = round_before(x, weight);
  Product product{{weight.begin(), weight.end()}, x.rows(), out.rows(), x.width};
  push(out.extent, count_panels(weight), out.width * x.width / 4,
       [this, scratch, product = std::move(product)](const Share& share) {
         const auto rows = static_cast<int>(share.num_rows);
         product.cut(share.first, share.last, [&](const Panels& w, int64_t first, int64_t last, Rows to) {
           if (activations_ == Activations::kBFloat16) {
             kernels_.bfloat16->linear(bfloat16_[scratch].rows(product.num_columns), rows, w, first, last,
                                       to);
           } else if (wants_int8(activations_, w)) {
             const auto kernel = kernels_.int8->linear[static_cast<int>(w.format)];
             kernel(int8_.rows(product.num_columns, w.offset), rows, w, first, last, to);
           } else {
             kernels_.linear(product.x, rows, w, first, last, to);
           }
         });
       });
  launches_.back().weights = streams_of(weight);
}

void Program::linear_swiglu(const View& x, std::span<const Panels> weight, const View& out) {
  const Checks checks = this->checks("linear_swiglu");
  checks.view("x", x);
  check_weight(checks, weight, x);
  checks.require(weight.size() == 1, "weight", "gate and up must have one format");
  const Panels& panels = weight[0];
  checks.require(panels.num_rows % (2 * kLanes) == 0, "weight",
                 std::to_string(panels.num_rows) + " rows, gate and up must have a multiple of " +
                     std::to_string(kLanes) + " each");
  checks.view("out", out, panels.num_rows / 2, x.extent);
  checks.apart("out", out, "x", x);
  const int scratch = round_before(x, weight);
  RoundedToo& also = *rounded_too_.emplace_back(std::make_unique<RoundedToo>(RoundedToo{out, 1 - scratch}));
  const int64_t half = panels.num_panels() / 2;
  push(out.extent, half, panels.num_rows * x.width / 4,
       [this, panels, scratch, &also, from = x.rows(), to = out.rows()](const Share& share) {
         const auto rows = static_cast<int>(share.num_rows);
         if (activations_ == Activations::kBFloat16) {
           const BFloat16Rows rounded = bfloat16_[also.scratch].rows(also.out.width);
           kernels_.bfloat16->linear_swiglu(bfloat16_[scratch].rows(panels.num_columns), rows, panels,
                                            share.first, share.last, to, also.wanted ? &rounded : nullptr);
         } else if (wants_int8(activations_, panels)) {
           const auto kernel = kernels_.int8->linear_swiglu[static_cast<int>(panels.format)];
           kernel(int8_.rows(panels.num_columns, panels.offset), rows, panels, share.first, share.last, to);
         } else {
           kernels_.linear_swiglu(from, rows, panels, share.first, share.last, to);
         }
       });
  launches_.back().also = &also;
  launches_.back().weights = {{panels.data, panels.panel_bytes(), 0, half},
                              {panels.panel(half), panels.panel_bytes(), 0, half}};
}

}  // namespace pagecast
