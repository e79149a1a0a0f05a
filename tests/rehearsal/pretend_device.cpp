// A pretend accelerator, device "sim": tensors lie in memory of the CPU, and every operator runs there. As on a real one an
// operator refuses tensors of two devices and generators of another one, and copies to the host are counted.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <cstdlib>
#include <cstring>
#include <set>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
const c10::Device sim_device(kSim, 0);
const c10::Stream sim_stream(c10::Stream::DEFAULT, sim_device);
const c10::DispatchKeySet sim_keys(c10::DispatchKey::PrivateUse1);

int64_t transfers = 0;
bool is_inside = false;  // an operator: its own copies are none that a program asked for

// --- memory, stream, generator

struct Memory : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = std::malloc(size ? size : 1);
    std::memset(data, 0xff, size);  // not a number until somebody writes to it
    return {data, data, &std::free, sim_device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
} memory;

struct Guard : c10::impl::NoOpDeviceGuardImpl<kSim> {
  c10::Device exchangeDevice(c10::Device) const override { return sim_device; }
  c10::Device getDevice() const override { return sim_device; }
  c10::Stream getStream(c10::Device) const noexcept override { return sim_stream; }
  c10::Stream getNewStream(c10::Device, int) const override { return sim_stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return sim_stream; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct SimGenerator : c10::GeneratorImpl {
  at::Generator own = at::detail::createCPUGenerator();
  SimGenerator() : c10::GeneratorImpl(sim_device, sim_keys) {}
  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return own.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "sim: no offsets"); }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl&) override { TORCH_CHECK(false, "sim: no states"); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { TORCH_CHECK(false, "sim: no states"); }
  SimGenerator* clone_impl() const override { TORCH_CHECK(false, "sim: no copies"); }
};

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Device getDeviceFromPtr(void*) const override { return sim_device; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<SimGenerator>(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator one = at::make_generator<SimGenerator>();
    return one;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto larger = memory.allocate(size);
    std::memcpy(larger.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
} hooks;

// --- tensors

bool is_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory
  if (!is_sim(tensor)) return tensor;
  auto storage = tensor.storage();
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto count = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  auto flat = at::from_blob(storage.mutable_data(), {count}, [storage](void*) {}, options);
  return flat.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

at::Tensor empty_sim(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, sim_keys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided_sim(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, sim_keys, c10::dtype_or_default(type));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  transfers += !is_inside && !is_sim(to);
  on_host(to).copy_(on_host(from));
  return to;
}

const at::Tensor& resize_sim(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto bytes = (c10::multiply_integers(size) + tensor.storage_offset()) * tensor.element_size();
  if (tensor.storage().nbytes() < static_cast<size_t>(bytes)) hooks.resizePrivateUse1Bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize_sim(to, from.sizes(), {});
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& tensor) {
  transfers += !is_inside;
  return on_host(tensor).item();
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  at::native::setStrided(tensor, size, stride, offset);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return set_storage(tensor, std::move(storage), 0, {count}, {1});
}

// --- every other operator

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> waits = {"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2"};
  const auto& schema = op.schema();
  const auto& name = schema.name();
  bool has_sim = false, has_host = false;
  auto look = [&](const at::Tensor& tensor) {
    has_sim |= is_sim(tensor);
    has_host |= tensor.defined() && !is_sim(tensor) && tensor.dim() > 0;
  };
  for (auto& value : torch::jit::last(*stack, schema.arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorList()) look(tensor);
  }
  TORCH_CHECK(!(has_sim && has_host), name, ": Expected all tensors to be on the same device, but found sim:0 and cpu");
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (!value.isGenerator()) continue;
    auto given = value.toGenerator();
    TORCH_CHECK(given.device().type() == kSim, name, ": Expected a generator on sim, got one on ", given.device());
    value = static_cast<SimGenerator*>(given.unsafeGetGeneratorImpl())->own;
  }
  transfers += !is_inside && waits.count(name);
  const bool before = std::exchange(is_inside, true);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    is_inside = before;
    throw;
  }
  is_inside = before;
}

}  // namespace

REGISTER_ALLOCATOR(kSim, &memory);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty_sim);
  library.impl("empty_strided", &empty_strided_sim);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("resize_", &resize_sim);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("transfers", [] { return transfers; }, "The copies to the host so far.");
}
