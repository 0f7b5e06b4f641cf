#include "streams.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

namespace testdevice {
namespace {

constexpr int64_t kMostStreams = 1 << 16;
constexpr int kPollsUntilProgress = 32;

struct Task {
    std::function<void()> work;  // empty for a wait
    Point needs;
    uint64_t order = 0;  // among the submissions to all streams
};

struct Queue {
    std::deque<Task> tasks;
    uint64_t submitted = 0;
    double speed = 1;
};

std::array<std::atomic<int64_t>, kCounters> counters;
// Outlive the queues' lock: the allocator asks whether work has passed while it holds a lock of its
// own.
std::array<std::atomic<uint64_t>, kMostStreams> completed;

thread_local int64_t current = 0;

class Scheduler {
  public:
    Scheduler() { queues_.emplace_back(); }

    void seed(uint64_t seed, double lateness) {
        std::unique_lock lock(mutex_);
        random_.seed(seed);
        lateness_ = lateness;
        seed_ = seed;
        made_ = 0;
        for (size_t stream = 0; stream < queues_.size(); ++stream) {
            queues_[stream].speed = speed_of(stream + kMostStreams);
        }
    }

    bool chance(double probability) {
        std::unique_lock lock(mutex_);
        return uniform() < probability;
    }

    int64_t new_stream() {
        std::unique_lock lock(mutex_);
        TORCH_CHECK(int64_t(queues_.size()) < kMostStreams, "the test device has no more streams");
        queues_.emplace_back().speed = speed_of(made_++);
        return int64_t(queues_.size()) - 1;
    }

    Point submit(int64_t stream, Task task) {
        std::unique_lock lock(mutex_);
        check_process();
        Queue& queue = at(stream);
        task.order = ++order_;
        queue.tasks.push_back(std::move(task));
        Point point{stream, ++queue.submitted};
        ++queued_;
        if (queued_ > counters[kMostQueued]) counters[kMostQueued] = queued_;
        let_time_pass();
        return point;
    }

    Point end_of(int64_t stream) {
        std::unique_lock lock(mutex_);
        return {stream, at(stream).submitted};
    }

    bool query(Point point) {
        std::unique_lock lock(mutex_);
        let_time_pass();
        if (!passed(point) && ++polls_ % kPollsUntilProgress == 0) step_toward(point);
        return passed(point);
    }

    void wait(Point point) {
        std::unique_lock lock(mutex_);
        finish(point);
        raise(lock);
    }

    void wait_for_all() {
        std::unique_lock lock(mutex_);
        for (size_t stream = 0; stream < queues_.size(); ++stream) {
            finish({int64_t(stream), queues_[stream].submitted});
        }
        raise(lock);
    }

    void report_failure(const std::string& message) {
        std::unique_lock lock(mutex_);
        note(message);
    }

  private:
    double uniform() { return std::uniform_real_distribution<double>()(random_); }

    // Some streams lag far behind the others, as a busy compute stream does.
    // Drawn beside the order, so that a seed gives the same order whatever streams were made
    // before.
    double speed_of(uint64_t stream) const {
        std::seed_seq numbers{seed_, stream};
        return std::mt19937_64(numbers)() % 10 < 3 ? 0.02 : 1;
    }

    Queue& at(int64_t stream) {
        TORCH_CHECK(stream >= 0 && stream < int64_t(queues_.size()), "no such stream: ", stream);
        return queues_[stream];
    }

    void check_process() {
        if (!process_) process_ = getpid();
        TORCH_CHECK(process_ == getpid(),
                    "the test device cannot be used again in a forked process");
    }

    bool ready(const Queue& queue) {
        return !queue.tasks.empty() &&
               (queue.tasks.front().work || passed(queue.tasks.front().needs));
    }

    void let_time_pass() {
        while (lateness_ < 1 && queued_ > 0 && uniform() >= lateness_) {
            std::vector<int64_t> heads;
            for (size_t stream = 0; stream < queues_.size(); ++stream) {
                if (ready(queues_[stream])) heads.push_back(int64_t(stream));
            }
            if (heads.empty()) return;
            const int64_t head = heads[random_() % heads.size()];
            if (uniform() < queues_[head].speed) run_head(head);
        }
    }

    void finish(Point point) {
        while (!passed(point)) {
            let_time_pass();
            if (!passed(point)) step_toward(point);
        }
    }

    // A wait is for work that was submitted before it, so this ends.
    void step_toward(Point point) {
        Queue& queue = at(point.stream);
        const Task& head = queue.tasks.front();
        if (!head.work && !passed(head.needs)) {
            step_toward(head.needs);
        } else {
            run_head(point.stream);
        }
    }

    void run_head(int64_t stream) {
        Queue& queue = queues_[stream];
        Task task = std::move(queue.tasks.front());
        queue.tasks.pop_front();
        --queued_;
        if (task.work) {
            try {
                task.work();
            } catch (const c10::Error& error) {
                note(error.what_without_backtrace());
            } catch (const std::exception& error) {
                note(error.what());
            }
            ++counters[kRun];
        }
        if (task.order < newest_) ++counters[kOutOfOrder];
        newest_ = std::max(newest_, task.order);
        ++completed[stream];
    }

    void note(const std::string& message) {
        if (failure_.empty()) failure_ = message;
    }

    void raise(std::unique_lock<std::mutex>& lock) {
        if (failure_.empty()) return;
        std::string message;
        std::swap(message, failure_);
        lock.unlock();
        TORCH_CHECK(false, "on the test device: ", message);
    }

    std::mutex mutex_;
    std::mt19937_64 random_{0};
    double lateness_ = 0.5;
    std::deque<Queue> queues_;
    uint64_t seed_ = 0, made_ = 0;
    int64_t queued_ = 0;
    uint64_t order_ = 0, newest_ = 0;
    int polls_ = 0;
    pid_t process_ = 0;
    std::string failure_;
};

// Never destroyed: threads of torch may submit work while the process ends.
Scheduler& scheduler() {
    static auto* one = new Scheduler;
    return *one;
}

}  // namespace

void seed_scheduler(uint64_t seed, double lateness) { scheduler().seed(seed, lateness); }
bool chance(double probability) { return scheduler().chance(probability); }
int64_t current_stream() { return current; }
int64_t exchange_stream(int64_t stream) { return std::exchange(current, stream); }
int64_t new_stream() { return scheduler().new_stream(); }
Point submit(std::function<void()> work) { return submit_to(current, std::move(work)); }
Point submit_to(int64_t stream, std::function<void()> work) {
    return scheduler().submit(stream, Task{std::move(work), {}, 0});
}
void submit_wait(int64_t stream, Point point) { scheduler().submit(stream, Task{{}, point, 0}); }
Point end_of(int64_t stream) { return scheduler().end_of(stream); }
bool passed(Point point) { return completed[point.stream] >= point.number; }
bool query(Point point) { return scheduler().query(point); }
void wait(Point point) {
    count(kHostWaits);
    scheduler().wait(point);
}
void wait_for_all() {
    count(kHostWaits);
    scheduler().wait_for_all();
}
void report_failure(const std::string& message) { scheduler().report_failure(message); }
void count(Counter counter) { ++counters[counter]; }
int64_t counted(Counter counter) { return counters[counter]; }

}  // namespace testdevice
