// A "cuda" device for a torch built without CUDA: its memory is the host's, its kernels are the CPU's.
//
// It behaves as a GPU where a program could go wrong: operands on two devices are refused, a copy to the host that was
// not waited for holds garbage, float64 and every wait of the host for the device are reported (`standin_watch`). It
// says nothing of kernels' numbers, streams or speed. Loaded before Python imports torch, which asks for its CUDA hooks
// once; `torchtrain/tests/cuda/standin.py` does that and sets up the Python side.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace {
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex DEVICES = 4;

thread_local c10::DeviceIndex current = 0;
thread_local bool inside = false;  // an operator's own copies are not the program's
std::atomic<int64_t> held[DEVICES], peak[DEVICES];
void (*watcher)(const char* what) = nullptr;

void report(const char* what) {
  if (watcher && !inside) watcher(what);
}

c10::DeviceIndex index_of(c10::Device device) {
  auto index = device.has_index() ? device.index() : current;
  TORCH_CHECK(index < DEVICES, "CUDA error: invalid device ordinal ", int(index));
  return index;
}

// --- copies to the host that nobody has waited for yet ----------------------------------------------------------------

struct Pending {
  at::Tensor from, to;  // both the host's memory
};
std::mutex pending_mutex;
std::vector<Pending> pending;

void finish_copies() {
  std::vector<Pending> due;
  {
    std::lock_guard<std::mutex> lock(pending_mutex);
    due.swap(pending);
  }
  for (auto& copy : due) copy.to.copy_(copy.from);
}

// What was last told to be copied to exactly this memory of the host, if nobody has waited for it yet.
at::Tensor last_copy_to(const at::Tensor& x) {
  std::lock_guard<std::mutex> lock(pending_mutex);
  for (auto copy = pending.rbegin(); copy != pending.rend(); ++copy)
    if (copy->to.const_data_ptr() == x.const_data_ptr() && copy->to.nbytes() == x.nbytes()) return copy->from;
  return {};
}

void wait_for_device(const char* what) {
  report(what);
  finish_copies();
}

// --- device, memory, hooks --------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device getDevice() const override { return {CUDA, current}; }
  void setDevice(c10::Device device) const override { current = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before{CUDA, current};
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {CUDA, index_of(device)});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device("synchronize"); }
  void synchronizeEvent(void*) const override { wait_for_device("synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_device("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Each block begins with its size and device; 64 bytes keep it aligned.
constexpr size_t HEADER = 64;

struct DeviceAllocator final : c10::Allocator {
  static void release(void* pointer) {
    if (!pointer) return;
    auto* base = reinterpret_cast<int64_t*>(static_cast<char*>(pointer) - HEADER);
    held[base[1]] -= base[0];
    std::free(base);
  }
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device{CUDA, current};
    if (!bytes) return {nullptr, nullptr, &release, device};
    auto* base = static_cast<int64_t*>(std::aligned_alloc(HEADER, (bytes + 2 * HEADER - 1) / HEADER * HEADER));
    TORCH_CHECK(base, "CUDA out of memory");
    base[0] = static_cast<int64_t>(bytes);
    base[1] = current;
    int64_t now = held[current] += base[0], most = peak[current];
    while (now > most && !peak[current].compare_exchange_weak(most, now)) {
    }
    void* data = reinterpret_cast<char*>(base) + HEADER;
    std::memset(data, 0xff, bytes);  // what was not written yet: nan, or -1
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceAllocator allocator;

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_blocks;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned_blocks.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned_blocks.begin()) return false;
  auto block = std::prev(after);
  return static_cast<const char*>(pointer) < block->first + block->second;
}

struct PinnedAllocator final : c10::Allocator {
  static void release(void* pointer) {
    if (!pointer) return;
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks.erase(static_cast<char*>(pointer));
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release, at::kCPU};
    auto* data = static_cast<char*>(std::aligned_alloc(HEADER, (bytes + HEADER - 1) / HEADER * HEADER));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks[data] = bytes;
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;
}  // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {  // torch looks the class up by this name
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(DeviceIndex) const override { wait_for_device("synchronize"); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace {
// --- tensors, views, copies -------------------------------------------------------------------------------------------

struct OnDevice {  // what is allocated meanwhile is this device's
  c10::DeviceIndex before = current;
  explicit OnDevice(c10::Device device) { current = index_of(device); }
  ~OnDevice() { current = before; }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  OnDevice on(device.value_or(CUDA));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(device.value_or(CUDA));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the host.
at::Tensor host(const at::Tensor& x) {
  if (!x.is_cuda()) return x;
  at::Tensor keep = x.detach();
  return at::from_blob(x.mutable_data_ptr(), x.sizes(), x.strides(), [keep](void*) {}, x.options().device(at::kCPU));
}

void transfer(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (from.is_cuda() && to.is_cpu()) {
    if (non_blocking && !inside && to.is_contiguous() && is_pinned(to.const_data_ptr())) {
      // The host goes on before it arrives.
      std::memset(to.mutable_data_ptr(), 0xff, to.nbytes());
      std::lock_guard<std::mutex> lock(pending_mutex);
      pending.push_back({host(from).clone(), to.detach()});
      return;
    }
    if (!inside) wait_for_device("copy to the host");
  } else if (from.is_cpu() && to.is_cuda() && from.numel() && !inside) {
    // As cudaMemcpyAsync has it: from memory that may be paged out it returns when all is copied.
    if (!non_blocking || !is_pinned(from.const_data_ptr())) wait_for_device("copy to the device");
    if (at::Tensor before = last_copy_to(from); before.defined()) {
      // The device works in order: what it was told to copy there it finds, though the host must not look yet.
      host(to).copy_(before.view_as(from));
      return;
    }
  }
  host(to).copy_(host(from));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  transfer(from, to, non_blocking);
  return to;
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  transfer(from, to, non_blocking);
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  OnDevice on(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  auto bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
  auto* storage = impl->storage().unsafeGetStorageImpl();
  if (storage->nbytes() < bytes) {
    c10::DataPtr fresh = allocator.allocate(bytes);
    if (storage->nbytes()) std::memcpy(fresh.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(fresh));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  transfer(from, to, false);
  return to;
}

at::Scalar local_scalar(const at::Tensor& x) {
  wait_for_device("item");
  return host(x).item();
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  auto size = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {size}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

at::Tensor as_strided(const at::Tensor& x, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> off) {
  return at::cpu::as_strided(x, size, stride, off);
}

at::Tensor reshape_alias(const at::Tensor& x, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::_reshape_alias(x, size, stride);
}

at::Tensor view(const at::Tensor& x, c10::IntArrayRef size) { return at::cpu::view(x, size); }

at::Tensor unfold(const at::Tensor& x, int64_t dim, int64_t size, int64_t step) {
  return at::cpu::unfold(x, dim, size, step);
}

void record_stream(at::Tensor&, c10::Stream) {}

// --- every other operator: the CPU's ----------------------------------------------------------------------------------

// Their results' sizes depend on what a tensor holds, so the host waits for it.
const std::set<std::string> WAITING = {"aten::nonzero",    "aten::masked_select",          "aten::_unique2",
                                       "aten::unique_dim", "aten::unique_consecutive",     "aten::equal",
                                       "aten::is_nonzero", "aten::repeat_interleave"};

bool is_mask(const at::Tensor& x) { return x.defined() && (x.dtype() == at::kBool || x.dtype() == at::kByte); }

// What is empty may be resized, which borrowed memory cannot.
at::Tensor borrow_tensor(const at::Tensor& x) {
  if (!x.defined() || !x.is_cuda()) return x;
  return x.numel() ? host(x) : at::empty(x.sizes(), x.options().device(at::kCPU));
}

// Put the host's view of the same memory in an argument's place: strides and all, so that the bits are the CPU's.
void borrow(c10::IValue& argument) {
  if (argument.isTensor()) {
    argument = borrow_tensor(argument.toTensor());
  } else if (argument.isTensorList()) {
    c10::List<at::Tensor> borrowed;
    for (const at::Tensor& x : argument.toTensorVector()) borrowed.push_back(borrow_tensor(x));
    argument = borrowed;
  } else if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> borrowed;
    for (std::optional<at::Tensor> x : argument.toOptionalTensorList()) {
      borrowed.push_back(x ? std::optional<at::Tensor>(borrow_tensor(*x)) : x);
    }
    argument = borrowed;
  } else if (argument.isDevice()) {
    argument = c10::Device(at::kCPU);
  }
}

at::Tensor give_tensor(const at::Tensor& x, c10::Device place) {
  if (!x.defined() || x.is_cuda()) return x;
  at::Tensor given = at::empty_strided(x.sizes(), x.strides(), x.options().device(place));
  host(given).copy_(x);
  return given;
}

// Put a result on the device.
void give(c10::IValue& result, c10::Device place) {
  if (result.isTensor()) {
    result = give_tensor(result.toTensor(), place);
  } else if (result.isTensorList()) {
    c10::List<at::Tensor> given;
    for (const at::Tensor& x : result.toTensorVector()) given.push_back(give_tensor(x, place));
    result = given;
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto count = schema.arguments().size();
  const bool indexes = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
  if (WAITING.count(name)) report(name.c_str());

  std::optional<c10::Device> device;
  auto look = [&](const at::Tensor& x, const c10::Argument& argument) {
    if (!x.defined()) return;
    if (indexes && argument.name() == "indices") {  // these may be the host's
      if (is_mask(x)) report("index by a mask");
      if (!x.is_cuda()) return;
    }
    if (!x.is_cuda() && x.dim() == 0) return;  // so may single numbers
    TORCH_CHECK(x.is_cuda() && x.device() == device.value_or(x.device()),
                "Expected all tensors to be on the same device, but argument ", argument.name(), " of ", name,
                " is on ", x.device(), device ? ", different from other tensors on " + device->str() : "");
    device = x.device();
    if (x.scalar_type() == at::kDouble) report(("float64 " + name).c_str());
  };
  auto arguments = torch::jit::last(stack, count);
  for (size_t i = 0; i < count; i++) {
    const auto& argument = schema.arguments()[i];
    if (arguments[i].isTensor()) {
      look(arguments[i].toTensor(), argument);
    } else if (arguments[i].isTensorList() || arguments[i].isOptionalTensorList()) {
      for (const c10::IValue& x : arguments[i].toListRef()) {
        if (x.isTensor()) look(x.toTensor(), argument);
      }
    }
  }
  const c10::Device place = device.value_or(c10::Device(CUDA, current));

  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  for (auto argument = stack->end() - count; argument != stack->end(); ++argument) borrow(*argument);
  const bool before = std::exchange(inside, true);
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } catch (...) {
    inside = before;
    throw;
  }
  inside = before;

  const auto returns = schema.returns().size();
  for (size_t i = 0; i < returns; i++) {
    auto& result = (*stack)[stack->size() - returns + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (!alias) {
      give(result, place);
      continue;
    }
    TORCH_CHECK(alias->isWrite(), name, " makes a view, and the stand-in for CUDA has no kernel for it");
    for (size_t j = 0; j < count; j++) {
      const auto* of = schema.arguments()[j].alias_info();
      if (!of || !of->isWrite() || of->beforeSets() != alias->beforeSets()) continue;
      if (given[j].isTensor() && given[j].toTensor().sizes() != result.toTensor().sizes()) {  // it was empty
        given[j].toTensor().resize_(result.toTensor().sizes());
        host(given[j].toTensor()).copy_(result.toTensor());
      }
      result = given[j];
      break;
    }
  }
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("record_stream", record_stream);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

// scaled_dot_product_attention asks this for its kernel, and takes the plain one where nobody answers.
namespace at::native {
int64_t choose_kernel(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout,
                      bool causal, std::optional<double> scale, bool gqa) {
  return at::_fused_sdp_choice(q, k, v, mask, dropout, causal, scale, gqa);  // `kernels.py` has it
}
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_kernel)
}  // namespace at::native

TORCH_LIBRARY(standin, m) { m.def("host(Tensor(a) x) -> Tensor(a)"); }
TORCH_LIBRARY_IMPL(standin, CUDA, m) { m.impl("host", host); }
TORCH_LIBRARY_IMPL(standin, CPU, m) { m.impl("host", host); }

extern "C" {
int standin_start() {  // whether torch has taken the hooks
  c10::SetAllocator(CUDA, &allocator, 10);
  // Where the CPU has a kernel, it runs here too, and not what composes the operator of others: the bits are the CPU's.
  auto& dispatcher = c10::Dispatcher::singleton();
  static std::vector<c10::RegistrationHandleRAII> kept;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || name.name == "aten::_fused_sdp_choice") continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    kept.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                           c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>(), std::nullopt,
                                           nullptr, "the stand-in for CUDA"));
  }
  return at::detail::getCUDAHooks().hasCUDA();
}
int standin_devices() { return DEVICES; }
int standin_current() { return current; }
void standin_set_current(int device) { current = static_cast<c10::DeviceIndex>(device); }
int64_t standin_held(int device) { return held[device]; }
int64_t standin_peak(int device) { return peak[device]; }
void standin_reset_peak(int device) { peak[device] = held[device].load(); }
void standin_synchronize() { wait_for_device("synchronize"); }
void standin_watch(void (*callback)(const char*)) { watcher = callback; }
}
