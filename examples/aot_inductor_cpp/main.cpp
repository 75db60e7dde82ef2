// Classifies images with a package that `scripts/export.py target=aot_inductor` wrote: ./classify model.pt2 pixels.raw
//
// pixels.raw holds one image or several, each [channels, height, width], as bare bytes of the package's type: uint8 unless it was
// exported with target.preprocess=false. Each image is answered by a line: the number of its class, then its logits.

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

namespace {

using Loader = torch::inductor::AOTIModelPackageLoader;
using Metadata = std::unordered_map<std::string, std::string>;

std::string entry(const Metadata& metadata, const std::string& key) {
  const auto found = metadata.find(key);
  if (found == metadata.end())
    throw std::runtime_error("the package has no entry " + key + ": export the run again with scripts/export.py");
  return found->second;
}

// [channels, height, width], which must be the same for every call
std::vector<int64_t> image_shape(const Metadata& metadata) {
  std::istringstream smallest(entry(metadata, "input_smallest")), largest(entry(metadata, "input_largest"));
  std::vector<int64_t> shape;
  for (int64_t low = 0, high = 0; smallest >> low && largest >> high;) {
    if (!shape.empty() && low != high)
      throw std::runtime_error("the package takes inputs of several sizes, which bare bytes don't tell apart");
    shape.push_back(low);
  }
  if (shape.size() != 4)
    throw std::runtime_error("the package does not take images [batch, channels, height, width]");
  return {shape.begin() + 1, shape.end()};
}

std::vector<char> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file.is_open() || file.bad() || bytes.empty())
    throw std::runtime_error(path + " is missing, empty or can't be read");
  return bytes;
}

std::unique_ptr<Loader> load(const std::string& package) {
  try {
    return std::make_unique<Loader>(package);
  } catch (const std::exception& error) {
    throw std::runtime_error(package + " can't be loaded, export the run again: " + error.what());
  }
}

void classify(const std::string& package, const std::string& pixels) {
  const std::unique_ptr<Loader> loader = load(package);
  const Metadata metadata = loader->get_metadata();
  const std::string name = entry(metadata, "input_dtype");
  if (name != "uint8" && name != "float32")
    throw std::runtime_error("the package takes " + name + ", not pixels");
  const auto type = name == "uint8" ? at::kByte : at::kFloat;

  std::vector<int64_t> shape = image_shape(metadata);
  int64_t size = static_cast<int64_t>(c10::elementSize(type));
  for (const int64_t side : shape) size *= side;
  std::vector<char> bytes = bytes_of(pixels);
  const auto length = static_cast<int64_t>(bytes.size());
  if (length % size != 0)
    throw std::runtime_error(
        pixels + " has " + std::to_string(length) + " bytes, which are no whole number of images of " + std::to_string(size));
  shape.insert(shape.begin(), length / size);

  const c10::InferenceMode inference;
  const std::vector<at::Tensor> outputs = loader->run({at::from_blob(bytes.data(), shape, type)});
  const at::Tensor logits = outputs.at(0).to(at::kFloat).contiguous();
  const at::Tensor classes = logits.argmax(1);
  for (int64_t row = 0; row < logits.size(0); ++row) {
    std::printf("%lld", static_cast<long long>(classes[row].item<int64_t>()));
    const float* values = logits.const_data_ptr<float>() + row * logits.size(1);
    for (int64_t column = 0; column < logits.size(1); ++column) std::printf(" %.6g", values[column]);
    std::printf("\n");
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s model.pt2 pixels.raw\n", arguments[0]);
    return 2;
  }
  try {
    classify(arguments[1], arguments[2]);
  } catch (const std::exception& error) {
    const std::string words = error.what();  // torch's go on with a stack of calls
    std::fprintf(stderr, "error: %s\n", words.substr(0, words.find('\n')).c_str());
    return 1;
  }
  return 0;
}
