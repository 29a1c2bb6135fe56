// Payloads into a batch's arrays: copied, hashed and filled up, wherever the payloads lie.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/checksum.hpp"
#include "common/copy.hpp"
#include "common/error.hpp"
#include "ring/ticket_note.hpp"

namespace transport {

// The tensors of a schema, as they stand one behind the other in a payload.
class BatchFields {
 public:
  struct Field {
    std::uint64_t row_bytes;  // of one entry of the leading dimension, or of the whole tensor where it is not ragged
    std::uint64_t most;       // entries
    bool ragged;
    bool optional = false;

    bool counted() const { return ragged || optional; }  // it has a number in a payload's ticket
    // Its entries in a payload, by that number, which is 0 where an optional one is absent, else one more than the
    // entries of its leading dimension. More than `most` for what is no number of it.
    std::uint64_t entries(std::uint64_t number) const {
      if (!optional || number == 0) return number;
      return ragged ? number - 1 : number == 1 ? most : most + 1;
    }
  };
  static constexpr std::uint64_t kAlignment = 64;
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;  // of all tensors: so that no sum of theirs wraps

  explicit BatchFields(std::vector<Field> all) : all_(std::move(all)) {
    for (const Field& field : all_) {
      std::uint64_t bytes = 0;
      if (field.most > kMostBytes || __builtin_mul_overflow(field.row_bytes, field.most, &bytes) ||
          (most_ += std::min(bytes, kMostBytes) + kAlignment) > kMostBytes)
        fail(Fault::argument, "tensors larger than any memory");
      counted_ += field.counted();
    }
  }
  const std::vector<Field>& all() const { return all_; }
  std::size_t counted() const { return counted_; }

  // Reads the numbers of a payload's counted tensors, `counted()` of them. False: note and size do not fit the fields.
  bool fit(std::string_view note, std::uint64_t size, std::uint64_t* lengths) const {
    return (counted_ == 0 || read_lengths(note, lengths, counted_)) && fill(lengths, size);
  }

  // Whether tensors of these lengths are a payload of this size.
  bool fill(const std::uint64_t* lengths, std::uint64_t size) const {
    std::uint64_t end = 0;
    std::size_t next = 0;
    for (const Field& field : all_) {
      const std::uint64_t rows = field.counted() ? field.entries(lengths[next++]) : field.most;
      if (rows > field.most) return false;
      end = aligned(end) + rows * field.row_bytes;
    }
    return end == size;
  }

  static std::uint64_t aligned(std::uint64_t at) { return (at + kAlignment - 1) / kAlignment * kAlignment; }

 private:
  std::vector<Field> all_;
  std::size_t counted_ = 0;
  std::uint64_t most_ = 0;
};

// Where a field of a batch goes: what a row has beyond its payload is filled. One that is skipped is left where it is.
struct GatherTarget {
  std::byte* data;
  std::uint64_t size, stride, start;
  bool packed;
  std::string fill;
  bool skipped = false;
};

// Copies payload after payload to its places.
class Gathering {
 public:
  // sizes: of the payloads, which must be those of their lengths.
  // lengths: numbers of the counted fields, of payload after payload; they stay until the end.
  Gathering(const BatchFields& fields, std::vector<GatherTarget> targets, const std::vector<std::uint64_t>& lengths,
            const std::vector<std::uint64_t>& sizes)
      : fields_(fields), lengths_(lengths), all_(std::move(targets)) {
    if (all_.size() != fields.all().size() || lengths.size() != sizes.size() * fields.counted())
      fail(Fault::argument, "the payloads were not measured by these fields");
    for (std::size_t i = 0; i < sizes.size(); ++i)
      if (!fields.fill(lengths.data() + i * fields.counted(), sizes[i]))
        fail(Fault::argument, "the payloads were not measured by these fields");
    for (const GatherTarget& target : all_) skips_ |= target.skipped;
    check_room(sizes.size());
  }

  // The next payload; its size is that of its lengths. False: its checksum is not the expected one (nullptr: it is not
  // verified), or there is no source.
  bool next(const std::byte* source, std::uint64_t size, const std::uint64_t* expected) {
    const bool fused = source != nullptr && expected && size >= kFusedBytes && !skips_;
    const bool good = source != nullptr && (!expected || fused || checksum(source, size) == *expected);
    std::optional<Checksum> hasher;
    if (fused) hasher.emplace();
    std::uint64_t end = 0;
    std::size_t length = next_ * fields_.counted();
    for (std::size_t f = 0; f < all_.size(); ++f) {
      const BatchFields::Field& field = fields_.all()[f];
      GatherTarget& target = all_[f];
      const std::uint64_t bytes =
          (field.counted() ? field.entries(lengths_[length++]) : field.most) * field.row_bytes;
      const std::uint64_t offset = BatchFields::aligned(end);
      if (target.skipped) {
        end = offset + bytes;
        continue;
      }
      std::byte* const place = target.data + target.start;
      if (fused) {
        hasher->update(source + end, offset - end);
        copy_and_update(*hasher, place, source + offset, bytes);
      } else if (good && bytes > 0) {
        copy_bytes(place, source + offset, bytes);
      }
      if (!target.packed) fill_with(place + bytes, target.stride - bytes, target.fill);
      target.start += target.packed ? bytes : target.stride;
      end = offset + bytes;
    }
    ++next_;
    return fused ? hasher->digest() == *expected : good;
  }

 private:
  void check_room(std::size_t count) const {
    std::size_t counted = 0;
    for (std::size_t f = 0; f < all_.size(); ++f) {
      const BatchFields::Field& field = fields_.all()[f];
      const GatherTarget& target = all_[f];
      if (target.skipped) {
        counted += field.counted();
        continue;
      }
      std::uint64_t end = target.start;
      if (end > target.size) fail(Fault::argument, "the memory of a field is too small for the batch");
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t bytes =
            (field.counted() ? field.entries(lengths_[i * fields_.counted() + counted]) : field.most) * field.row_bytes;
        const std::uint64_t step = target.packed ? bytes : target.stride;
        if (bytes > step || step > target.size - end)
          fail(Fault::argument, "the memory of a field is too small for the batch");
        end += step;
      }
      if (target.fill.empty()) fail(Fault::argument, "a fill value has at least one byte");
      counted += field.counted();
    }
  }

  // Repeats the pattern over the memory, whose size is a multiple of its own.
  static void fill_with(std::byte* memory, std::uint64_t size, const std::string& pattern) {
    if (size == 0) return;
    if (std::all_of(pattern.begin(), pattern.end(), [&](char c) { return c == pattern[0]; })) {
      std::memset(memory, static_cast<unsigned char>(pattern[0]), size);
      return;
    }
    std::uint64_t done = std::min<std::uint64_t>(size, pattern.size());
    std::memcpy(memory, pattern.data(), done);
    while (done < size) {
      const std::uint64_t piece = std::min(done, size - done);
      std::memcpy(memory + done, memory, piece);
      done += piece;
    }
  }

  const BatchFields& fields_;
  const std::vector<std::uint64_t>& lengths_;
  std::vector<GatherTarget> all_;
  bool skips_ = false;
  std::size_t next_ = 0;
};

}  // namespace transport
