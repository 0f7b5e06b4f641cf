#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "numa.h"

namespace offload {
namespace {

std::atomic<int> wanted_threads{1};

// A range that is being processed. Stored on its caller's stack until every member has left it.
class Job {
  public:
    Job(std::size_t begin, std::size_t numel, const RangeTask& task, int node)
        : numel_(numel), task_(task), node_(node), next_(begin) {}

    [[nodiscard]] int node() const { return node_; }

    void work() {
        for (;;) {
            const std::size_t begin = next_.fetch_add(kChunk, std::memory_order_relaxed);
            if (begin >= numel_) return;
            task_(begin, std::min(begin + kChunk, numel_));
        }
    }

  private:
    std::size_t numel_;
    const RangeTask& task_;
    const int node_;
    std::atomic<std::size_t> next_;
};

// Members sleep on `called_`. A member that wakes while a job is open joins it; one that wakes late
// finds no job and sleeps again, so that no caller ever waits for a slow wake-up.
class Team {
  public:
    // Processes [begin, numel). Returns false, without effect, if the team is busy with another
    // caller.
    [[nodiscard]] bool try_run(std::size_t begin, std::size_t numel, const RangeTask& task,
                               int threads, int node) {
        const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn) return false;
        hire(threads - 1);
        Job job(begin, numel, task, node);
        open(&job, threads - 1);
        job.work();
        close();
        return true;
    }

  private:
    // Detached, because the team is never destroyed: see [Note: team and fork].
    void hire(int wanted) {
        // Members block signals, which are for the caller's threads.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (; members_ < wanted; ++members_) {
                std::thread(&Team::member, this, members_).detach();
            }
        } catch (const std::exception&) {
            // No further threads, or no memory for one: the existing ones do the work.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void open(Job* job, int seats) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            job_ = job;
            seats_ = seats;
            ++round_;
        }
        called_.notify_all();
    }

    void close() {
        std::unique_lock<std::mutex> lock(mutex_);
        job_ = nullptr;
        left_.wait(lock, [this] { return working_ == 0; });
    }

    void member(int seat) {
        std::uint64_t seen = 0;
        int node = -1;
        cpu_set_t allowed;  // processors of the thread that started this one
        const bool known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            called_.wait(lock, [&] { return job_ != nullptr && seat < seats_ && round_ != seen; });
            seen = round_;
            Job* job = job_;
            ++working_;
            lock.unlock();
            if (known && job->node() >= 0 && job->node() != node) {
                try {
                    run_beside(node = job->node(), allowed);
                } catch (const std::bad_alloc&) {
                    // No memory for the node's list: any processor will do.
                }
            }
            job->work();
            lock.lock();
            if (--working_ == 0) left_.notify_one();
        }
    }

    std::mutex turn_;  // held by the caller whose job it is
    int members_ = 0;  // guarded by turn_

    std::mutex mutex_;  // guards the members below
    std::condition_variable called_;
    std::condition_variable left_;
    Job* job_ = nullptr;
    int seats_ = 0;
    std::uint64_t round_ = 0;
    int working_ = 0;
};

// [Note: team and fork] A forked child contains the team's memory but not its threads, and its
// locks may be held forever. The child therefore forgets the team and makes its own at the next
// call. For the same reason, and since members may be asleep in a team at exit, no team is ever
// freed.
std::atomic<Team*> team{nullptr};

void forget_team() { team.store(nullptr); }

Team& current_team() {
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, forget_team);
    Team* found = team.load(std::memory_order_acquire);
    if (found == nullptr) {
        Team* made = new Team;
        if (team.compare_exchange_strong(found, made)) return *made;
        delete made;  // another thread was first; this one has no members yet
    }
    return *found;
}

}  // namespace

void set_thread_count(int count) { wanted_threads.store(std::max(count, 1)); }

int thread_count() { return wanted_threads.load(std::memory_order_relaxed); }

void share_out(std::size_t numel, const RangeTask& task, const void* memory) {
    const int threads = thread_count();
    const int node = threads > 1 && numel > kChunk ? node_of(memory) : -1;
    for (std::size_t begin = 0; begin < numel; begin += kChunk) {
        const bool shares = threads > 1 && numel - begin > kChunk;
        if (shares && current_team().try_run(begin, numel, task, threads, node)) return;
        task(begin, std::min(begin + kChunk, numel));
    }
}

}  // namespace offload
