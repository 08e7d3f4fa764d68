// Threads that do one thing after the other together, each piece of it whoever is free.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace passes {

constexpr int SPINS_MAX = 1 << 14;  // before a thread lets others have its core: some 200 us
constexpr std::chrono::milliseconds IDLE_MAX{3};  // before a thread sleeps: a decision's next pass is less than that away
constexpr int TURNS = 8;  // of each thread, where pieces are small and alike: it takes some at once
constexpr int SPINS_A_LOOK = 1 << 10;  // at the clock

// Of what stands in rows, some that a thread has for itself, or all for a team together.
struct Rows {
    int begin, end;
    bool alone;
};

// A step is over when its pieces are done, whoever did them: nobody waits for a thread that has none, for it may have lost its
// core to another process. It skips what the others did meanwhile, or all of it.
class Team {
   public:
    explicit Team(int threads) : threads_(threads) {
        try {
            for (int rank = 1; rank < threads; ++rank) others_.emplace_back([this, rank] { serve(rank); });
        } catch (...) {  // no thread left: those that began would end the process with their owner
            end();
            throw;
        }
    }

    ~Team() { end(); }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int threads() const { return threads_; }

    // Have threads that sleep awake for work that comes soon.
    void wake() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ++wakes_;
        }
        called_.notify_all();
    }

    // Let every thread that is free, this one among them, do `work(rank)`, and return when it is done. All do the same steps.
    void run(const std::function<void(int)>& work) {
        work_ = &work;
        taken_.store(0, std::memory_order_relaxed);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            open_.store(++rounds_);
        }
        called_.notify_all();
        step_ = 0;
        work(0);
        open_.store(0);
        wait([&] { return inside_.load() == 0; });
    }

    // Within `run`, by every thread: do `piece(i)` for all i below `count`, and go on when all are done.
    template <class Piece>
    void each(int count, Piece&& piece) {
        some(count, 1, piece);
    }

    // The same of rows, or by the thread that calls alone.
    template <class Piece>
    void each(const Rows& rows, Piece&& piece) {
        if (!rows.alone) return some(rows.end, rows.end / (TURNS * threads_) + 1, piece);
        for (int row = rows.begin; row < rows.end; ++row) piece(row);
    }

   private:
    template <class Piece>
    void some(int count, int together, Piece&& piece) {
        const uint64_t first = step_++ << 32, next = first + (uint64_t{1} << 32);
        uint64_t at = taken_.load(std::memory_order_acquire);
        int did = 0;
        while (at < first + count) {
            if (!taken_.compare_exchange_weak(at, at + together, std::memory_order_acquire)) continue;
            const int from = static_cast<int>(at - first), to = from + together < count ? from + together : count;
            for (int i = from; i < to; ++i) piece(i);
            did += to - from;
            at = taken_.load(std::memory_order_acquire);
        }
        if (count == 0 ? at == first : did && done_.fetch_add(did, std::memory_order_acq_rel) + did == count) {
            if (count) done_.store(0, std::memory_order_relaxed), taken_.store(next, std::memory_order_release);
            else taken_.compare_exchange_strong(at, next, std::memory_order_acq_rel);
            return;
        }
        wait([&] { return taken_.load(std::memory_order_acquire) >= next; });
    }

    template <class Over>
    static void wait(Over&& over) {
        for (int spins = 0; !over(); ++spins) {
            if (spins < SPINS_MAX) _mm_pause();
            else std::this_thread::yield();
        }
    }

    void end() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
        }
        called_.notify_all();
        for (auto& each : others_) each.join();
    }

    void serve(int rank) {
        for (long seen = 0, woken = 0;;) {
            const auto sleeps = std::chrono::steady_clock::now() + IDLE_MAX;
            const auto called = [&] { const long open = open_.load(); return open && open != seen; };
            bool idle = false;
            for (int spins = 1; !idle && !called(); ++spins) {
                idle = spins % SPINS_A_LOOK == 0 && std::chrono::steady_clock::now() > sleeps;
                _mm_pause();
            }
            if (idle) {
                std::unique_lock<std::mutex> lock(mutex_);
                called_.wait(lock, [&] { return ends_ || called() || wakes_ != woken; });
                if (ends_) return;
                woken = wakes_;
            }
            inside_.fetch_add(1);  // before another look: whoever closes a round looks for those inside afterwards
            if (const long open = open_.load(); open && open != seen) {
                seen = open, step_ = 0;
                (*work_)(rank);
            }
            inside_.fetch_sub(1);
        }
    }

    inline static thread_local uint64_t step_ = 0;  // of this round, which this thread comes to

    const int threads_;
    std::vector<std::thread> others_;
    std::mutex mutex_;
    std::condition_variable called_;
    bool ends_ = false;
    long wakes_ = 0, rounds_ = 0;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<long> open_{0};  // the round that may be joined, 0: none
    std::atomic<int> inside_{0};
    alignas(64) std::atomic<uint64_t> taken_{0};  // the step that is under way, and how many of its pieces somebody took
    alignas(64) std::atomic<int> done_{0};
};

}  // namespace passes
