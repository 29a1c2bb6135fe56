// Size classes, the bound on what is idle, and threads that lend and give back at once.
#include <sys/wait.h>

#include <random>
#include <thread>

#include "common/block_pool.hpp"
#include "check.hpp"

using namespace transport;

namespace {

constexpr std::size_t kSize = 8192;

std::shared_ptr<BlockPool> pool_of(std::size_t most_idle_bytes = std::size_t{1} << 30) {
  return std::make_shared<BlockPool>(most_idle_bytes);
}

}  // namespace

TEST(a_size_class_is_the_smallest_that_holds_the_size) {
  for (unsigned power = 0; power <= 62; ++power)
    for (std::size_t near = 0; near < 5; ++near) {
      const std::size_t size = (std::size_t{1} << power) + near - 2;
      if (size > size_class::kLargest) continue;  // also where it wrapped below zero
      const unsigned index = size_class::index(size);
      CHECK(size_class::bytes(index) >= size);
      CHECK(index == 0 || size_class::bytes(index - 1) < size);
      CHECK(size <= 4096 || (size_class::bytes(index) - size) * 4 <= size);
      CHECK(size_class::index(size_class::bytes(index)) == index);
    }
}

TEST(what_comes_back_is_lent_again_before_anything_new) {
  const auto pool = pool_of();
  std::byte* first = nullptr;
  {
    const Block block(pool, kSize);
    first = block.data();
    CHECK(pool->lent() == 1 && pool->idle_bytes() == 0);
  }
  CHECK(pool->lent() == 0 && pool->idle_bytes() == kSize);
  const Block again(pool, kSize - 1000), other(pool, kSize);
  CHECK(again.data() == first && other.data() != first);
}

TEST(blocks_of_every_kind_are_writable_and_aligned) {
  const auto pool = pool_of();
  for (std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{100'000}, std::size_t{300'000},
                           std::size_t{2} << 20, (std::size_t{5} << 20) + 1})
    for (int round = 0; round < 2; ++round) {  // fresh, then used again
      const Block block(pool, size);
      CHECK(block.size() == size && block.data() != nullptr);
      const std::size_t alignment = size >= std::size_t{2} << 20 ? std::size_t{2} << 20 : size >= 65536 ? 4096 : 64;
      CHECK(reinterpret_cast<std::uintptr_t>(block.data()) % alignment == 0);
      std::memset(block.data(), 7, size);
    }
}

TEST(idle_bytes_stay_within_their_bound) {
  const auto pool = pool_of(3 * kSize + 100);
  {
    std::vector<Block> blocks;
    for (int i = 0; i < 5; ++i) blocks.emplace_back(pool, kSize);
  }
  CHECK(pool->lent() == 0 && pool->idle_bytes() == 3 * kSize);
  { const Block large(pool, 4 * kSize); }
  CHECK(pool->idle_bytes() == 3 * kSize);
  pool->clear();
  CHECK(pool->idle_bytes() == 0);
}

TEST(what_cannot_be_had_is_not_lent) {
  const auto pool = pool_of();
  for (std::size_t size : {std::size_t{1} << 60, ~std::size_t{0}}) {
    const Block block(pool, size);
    CHECK(block.data() == nullptr);
  }
  CHECK(pool->lent() == 0);
}

TEST(threads_never_share_a_block) {
  constexpr std::size_t kBound = 8 * kSize;
  const auto pool = pool_of(kBound);
  std::vector<std::thread> threads;
  for (unsigned mark = 1; mark <= 4; ++mark)
    threads.emplace_back([pool, mark] {
      std::minstd_rand chance(mark);
      constexpr std::size_t sizes[] = {100, 5000, kSize, 3 * kSize, 300'000};
      std::vector<Block> held;
      const auto intact = [mark](const Block& block) {
        for (std::size_t i = 0; i < block.size(); i += 64)
          if (block.data()[i] != static_cast<std::byte>(mark)) return false;
        return true;
      };
      for (int round = 0; round < 3000; ++round) {
        Block block(pool, sizes[chance() % std::size(sizes)]);
        CHECK(block.data() != nullptr);
        std::memset(block.data(), static_cast<int>(mark), block.size());
        held.push_back(std::move(block));
        if (held.size() > 6) {
          CHECK(intact(held.front()));
          std::vector<Block> kept;
          for (std::size_t i = 1; i < held.size(); ++i) kept.push_back(std::move(held[i]));
          held.swap(kept);
        }
        if (round % 500 == 0) pool->clear();
        CHECK(pool->idle_bytes() <= kBound);
      }
      for (const Block& each : held) CHECK(intact(each));
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(pool->lent() == 0);
  pool->clear();
  CHECK(pool->idle_bytes() == 0);
}

TEST(a_child_forked_while_others_take_can_take_itself) {
  const auto pool = pool_of();
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) const Block block(pool, kSize);
  });
  for (int i = 0; i < 50; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);  // a child that waits for ever ends by it
      for (int j = 0; j < 3; ++j) const Block block(pool, kSize);
      _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  }
  stop = true;
  busy.join();
}

int main(int argc, char** argv) { return transport::test::run_all(argc, argv); }
