// Streams, events, devices and generators, as torch asks for them.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <memory>

#include "host_memory.h"
#include "memory.h"
#include "streams.h"

namespace testdevice {
namespace {

c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

struct Event {
    Point point;
    // Milliseconds, written when the stream comes there.
    std::shared_ptr<double> time = std::make_shared<double>(0);
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kDevice; }
    c10::Device exchangeDevice(c10::Device) const override { return device(); }
    c10::Device getDevice() const override { return device(); }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }

    // torch 2.6 promises that these two throw nothing; later versions do not.
    c10::Stream getStream(c10::Device) const noexcept override {
        return stream_of(current_stream());
    }
    c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
        return stream_of(new_stream());
    }
    c10::Stream getNewStream(c10::Device, int) const override { return stream_of(new_stream()); }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
        return stream_of(exchange_stream(stream.id()));
    }
    bool queryStream(const c10::Stream& stream) const override {
        return query(end_of(stream.id()));
    }
    void synchronizeStream(const c10::Stream& stream) const override { wait(end_of(stream.id())); }
    void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_all(); }
    void recordDataPtrOnStream(const c10::DataPtr& block,
                               const c10::Stream& stream) const override {
        record_block(block, stream.id());
    }

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
                const c10::EventFlag) const override {
        if (!*event) *event = new Event;
        auto time = std::make_shared<double>(0);
        static_cast<Event*>(*event)->time = time;
        static_cast<Event*>(*event)->point = submit_to(stream.id(), [time] {
            const auto now = std::chrono::steady_clock::now().time_since_epoch();
            *time = std::chrono::duration<double, std::milli>(now).count();
        });
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event) submit_wait(stream.id(), static_cast<Event*>(event)->point);
    }
    bool queryEvent(void* event) const override {
        return !event || query(static_cast<Event*>(event)->point);
    }
    void synchronizeEvent(void* event) const override {
        if (event) wait(static_cast<Event*>(event)->point);
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        return *static_cast<Event*>(second)->time - *static_cast<Event*>(first)->time;
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// The device draws its numbers by a generator of the CPU, when work is submitted: torch's default
// one by default, so a model on the device has the numbers that it has on the CPU.
struct DeviceGenerator final : c10::GeneratorImpl {
    explicit DeviceGenerator(at::Generator numbers)
        : c10::GeneratorImpl(device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          cpu(std::move(numbers)) {}

    void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
    void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
    uint64_t get_offset() const override { return cpu.get_offset(); }
    uint64_t current_seed() const override { return cpu.current_seed(); }
    uint64_t seed() override { return cpu.seed(); }
    void set_state(const c10::TensorImpl& state) override {
        cpu.unsafeGetGeneratorImpl()->set_state(state);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return cpu.unsafeGetGeneratorImpl()->get_state();
    }
    DeviceGenerator* clone_impl() const override { return new DeviceGenerator(cpu.clone()); }

    at::Generator cpu;
};

const at::Generator& default_generator() {
    static const auto* one = new at::Generator(
        c10::make_intrusive<DeviceGenerator>(at::detail::getDefaultCPUGenerator()));
    return *one;
}

struct Hooks final : at::PrivateUse1HooksInterface {
    // Without `override`: torch 2.6 does not ask for these two.
    bool isBuilt() const { return true; }
    bool isAvailable() const { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    void init() const override {}
    c10::DeviceIndex deviceCount() const override { return 1; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    at::Device getDeviceFromPtr(void*) const override { return device(); }
    bool isPinnedPtr(const void* at) const override { return is_pinned(at, 1); }
    at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return default_generator();
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override {
        return at::Generator(
            c10::make_intrusive<DeviceGenerator>(at::detail::createCPUGenerator()));
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override;
};

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const {
    TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
    c10::DataPtr fresh = c10::GetAllocator(kDevice)->allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    if (kept) c10::GetAllocator(kDevice)->copy_data(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
}

const bool registered = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

}  // namespace

at::Generator numbers_of(const at::Generator& generator) {
    const auto* own = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
    return own ? own->cpu : generator;
}

}  // namespace testdevice
