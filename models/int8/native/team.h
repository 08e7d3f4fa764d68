// Threads that do the steps of a work together, one after the other; each piece of a step is done by any free thread.
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

constexpr int SPINS_MAX = 1 << 14;  // spins, about 200 us, before a thread yields its core to others
constexpr std::chrono::milliseconds IDLE_MAX{3};  // before a thread sleeps: the next pass of a decision comes sooner
constexpr int TURNS = 8;  // how often a thread takes pieces in a step of small, equal ones: it takes several at once
constexpr int SPINS_A_LOOK = 1 << 10;  // spins for each look at the clock

// Rows `begin` to `end`: for one thread `alone`, or for all threads of a team together.
struct Rows {
    int begin, end;
    bool alone;
};

// A step is over when its pieces are done, by any threads. Nobody waits for a thread without a piece, because it may have lost
// its core to another process; when it continues, it skips what the others have done meanwhile.
class Team {
   public:
    explicit Team(int threads) : threads_(threads) {
        try {
            for (int rank = 1; rank < threads; ++rank) others_.emplace_back([this, rank] { serve(rank); });
        } catch (...) {  // no more threads: destroying the running ones without a join would end the process
            end();
            throw;
        }
    }

    ~Team() { end(); }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int threads() const { return threads_; }

    // Wake sleeping threads for work that comes soon.
    void wake() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ++wakes_;
        }
        called_.notify_all();
    }

    // Do `work(rank)` in every free thread and in this one (rank 0); return when all are done. All do the same steps.
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

    // Called within `run`, by every thread: do `piece(i)` for all i below `count`; return when all are done.
    template <class Piece>
    void each(int count, Piece&& piece) {
        some(count, 1, piece);
    }

    // The same for rows; with `alone`, the calling thread does all of them.
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
            inside_.fetch_add(1);  // before `open_` is read again: `run` closes the round first and then waits for `inside_`
            if (const long open = open_.load(); open && open != seen) {
                seen = open, step_ = 0;
                (*work_)(rank);
            }
            inside_.fetch_sub(1);
        }
    }

    inline static thread_local uint64_t step_ = 0;  // this thread's next step of the round

    const int threads_;
    std::vector<std::thread> others_;
    std::mutex mutex_;
    std::condition_variable called_;
    bool ends_ = false;
    long wakes_ = 0, rounds_ = 0;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<long> open_{0};  // the round that may be joined; 0: none
    std::atomic<int> inside_{0};
    alignas(64) std::atomic<uint64_t> taken_{0};  // the current step (upper 32 bits) and how many of its pieces are taken
    alignas(64) std::atomic<int> done_{0};
};

}  // namespace passes
