// The Python module: which kernels are built in, which of them run here. The ops themselves are registered with torch
// when this library is loaded.
#include <Python.h>
#include <torch/headeronly/version.h>

#include <cstring>
#include <string>
#include <utility>

#include "../cpu/dispatch.h"

namespace {

using seq1f1b::DType;
namespace cpu = seq1f1b::cpu;

constexpr std::pair<const char*, DType> dtypes[] = {
    {"float32", DType::float32},
    {"float64", DType::float64},
    {"bfloat16", DType::bfloat16},
    {"float16", DType::float16},
};

PyObject* cpu_variants(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  if (!names) return nullptr;
  for (const std::string& variant : cpu::variants()) {
    PyObject* name = PyUnicode_FromString(variant.c_str());
    const bool added = name && PyList_Append(names, name) == 0;
    Py_XDECREF(name);
    if (!added) {
      Py_DECREF(names);
      return nullptr;
    }
  }
  return names;
}

PyObject* cpu_variant(PyObject*, PyObject* arguments) {
  const char* wanted = nullptr;
  if (!PyArg_ParseTuple(arguments, "s:cpu_variant", &wanted)) return nullptr;
  for (const auto& [name, dtype] : dtypes)
    if (std::strcmp(name, wanted) == 0) return PyUnicode_FromString(cpu::kernels(dtype).name);
  return PyErr_Format(
      PyExc_ValueError, "expected float32, float64, bfloat16 or float16 as the name of a dtype, got '%s'", wanted);
}

PyObject* use_cpu_variant(PyObject*, PyObject* arguments) {
  const char* wanted = nullptr;
  if (!PyArg_ParseTuple(arguments, "s:use_cpu_variant", &wanted)) return nullptr;
  if (cpu::use(wanted)) Py_RETURN_NONE;
  std::string available;
  for (const std::string& variant : cpu::variants()) available += (available.empty() ? "" : ", ") + variant;
  return PyErr_Format(
      PyExc_ValueError, "the CPU kernels have no variant '%s' here; available are: %s", wanted, available.c_str());
}

std::string quoted(const char* text) {
  std::string result = "\"";
  for (; *text; ++text) {
    if (*text == '"' || *text == '\\') result += '\\';
    result += *text;
  }
  return result + '"';
}

std::string built_variants() {
  std::string names;
  for (const cpu::Kernels* kernels : {cpu::generic_kernels, cpu::avx2_kernels, cpu::avx512_kernels, cpu::amx_kernels})
    if (kernels) names += (names.empty() ? "" : ", ") + quoted(kernels->name);
  return names;
}

PyObject* build_info(PyObject*, PyObject*) {
#ifdef __clang__
  const char* const compiler = __VERSION__;
#else
  const char* const compiler = "GCC " __VERSION__;
#endif
  constexpr unsigned long long target = TORCH_TARGET_VERSION;
  const std::string oldest = std::to_string(target >> 56) + "." + std::to_string(target >> 48 & 0xff);
  std::string text = "{\"compiler\": " + quoted(compiler) + ", \"torch\": " + quoted(TORCH_VERSION) +
                     ", \"torch_abi\": " + quoted(oldest.c_str()) + ", \"cpu_variants\": [" + built_variants() +
                     "], \"cuda\": ";
#ifdef SEQ1F1B_CUDA
  text += "{\"version\": " + quoted(SEQ1F1B_CUDA_VERSION) + ", \"architectures\": [" SEQ1F1B_CUDA_ARCHITECTURES "]}}";
#else
  text += "null}";
#endif
  return PyUnicode_FromString(text.c_str());
}

PyMethodDef functions[] = {
    {"cpu_variants", cpu_variants, METH_NOARGS,
     "cpu_variants() -> list[str]\n\nVariants of the CPU kernels that run on this machine, slowest first."},
    {"cpu_variant", cpu_variant, METH_VARARGS,
     "cpu_variant(dtype: str) -> str\n\nThe variant of the CPU kernels that computes a dtype."},
    {"use_cpu_variant", use_cpu_variant, METH_VARARGS,
     "use_cpu_variant(name: str) -> None\n\nCompute with one variant wherever it can; '' for the fastest again."},
    {"build_info", build_info, METH_NOARGS, "build_info() -> str\n\nHow this library was built, as JSON."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "The attention kernels of lightning_seq1f1b.", -1, functions,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module); }
