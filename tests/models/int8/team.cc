// Steps of a team in which every piece reads all that the step before wrote: `team THREADS ROUNDS SEED`. Exits with 1 where
// a sum is not what one thread alone makes of it.
#include "team.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

using namespace passes;

namespace {

constexpr int PIECES_MAX = 50;
using Step = std::vector<uint64_t>;

void piece(const Step& before, Step& now, int n) { now[n] += std::accumulate(before.begin(), before.end(), uint64_t{n + 1u}); }

// Several steps, some of no piece, one, or many at once; now and then the threads have slept.
bool all_are_done(Team& team, std::mt19937& random) {
    std::vector<int> counts(random() % 40 + 1);
    for (auto& each : counts) each = random() % 5 == 0 ? 0 : random() % 3 == 0 ? 1 : random() % PIECES_MAX;
    std::vector<Step> found(counts.size() + 1, Step(PIECES_MAX, 1)), expected = found;
    if (random() % 8 == 0) team.wake();
    if (random() % 20 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 8));
    team.run([&](int) {
        for (size_t n = 0; n < counts.size(); ++n) {
            const auto each = [&](int i) { piece(found[n], found[n + 1], i); };
            if (n % 2) team.each(counts[n], each);
            else team.each(Rows{0, counts[n], false}, each);
        }
    });
    for (size_t n = 0; n < counts.size(); ++n)
        for (int i = 0; i < counts[n]; ++i) piece(expected[n], expected[n + 1], i);
    return found == expected;
}

// Threads that have lost their cores before they had a piece: the first one does everything, and they skip it.
bool nobody_waits_for_who_has_nothing(Team& team) {
    std::atomic<bool> over{false};
    std::atomic<int> others{0};
    std::vector<int> done(100, 0);
    team.run([&](int rank) {
        while (rank && !over.load()) std::this_thread::yield();
        for (int n = 0; n < 100; ++n) team.each(1, [&](int) { done[n] += 1, others += rank != 0; });
        over = true;
    });
    return std::accumulate(done.begin(), done.end(), 0) == 100 && others == 0;
}

}  // namespace

int main(int, char** given) {
    Team team(std::atoi(given[1]));
    std::mt19937 random(std::atoi(given[3]));
    for (int n = std::atoi(given[2]); n > 0; --n) {
        if (!all_are_done(team, random)) return std::puts("another sum than one thread alone makes"), 1;
        if (!nobody_waits_for_who_has_nothing(team)) return std::puts("a thread waited for one that had nothing to do"), 1;
    }
    return 0;
}
