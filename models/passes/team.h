// Threads that do one thing after the other together, each piece of it whoever is free.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
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

    // Let every thread, this one among them, do `work(rank)`, and return when all are done.
    void run(const std::function<void(int)>& work) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
            next_.store(0);
            round_.fetch_add(1, std::memory_order_release);
        }
        called_.notify_all();
        work(0);
        meet();
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
        for (int i; (i = next_.fetch_add(together, std::memory_order_relaxed)) < count;)
            for (const int last = i + together < count ? i + together : count; i < last; ++i) piece(i);
        meet();
    }

    void end() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
        }
        called_.notify_all();
        for (auto& each : others_) each.join();
    }

    void meet() {
        const int now = met_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            met_.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; met_.load(std::memory_order_acquire) == now; ++spins) {
            if (spins < SPINS_MAX) _mm_pause();
            else std::this_thread::yield();
        }
    }

    void serve(int rank) {
        for (long seen = 0, woken = 0;;) {
            const auto sleeps = std::chrono::steady_clock::now() + IDLE_MAX;
            for (int spins = 1; round_.load(std::memory_order_acquire) == seen; ++spins) {
                if (spins % SPINS_A_LOOK == 0 && std::chrono::steady_clock::now() > sleeps) break;
                _mm_pause();
            }
            {
                std::unique_lock<std::mutex> lock(mutex_);
                called_.wait(lock, [&] { return ends_ || round_.load() != seen || wakes_ != woken; });
                if (ends_) return;
                woken = wakes_;
                if (round_.load() == seen) continue;
            }
            ++seen;
            (*work_)(rank);
            meet();
        }
    }

    const int threads_;
    std::vector<std::thread> others_;
    std::mutex mutex_;
    std::condition_variable called_;
    bool ends_ = false;
    long wakes_ = 0;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<long> round_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> met_{0};
};

}  // namespace passes
