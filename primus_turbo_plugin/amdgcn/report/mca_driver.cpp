// Runs LLVM's machine code analyser (MCA) on a piece of AMDGPU assembly, as `llvm-mca` would.
//
//     mca_driver CPU ITERATIONS < loop.s
//
// Prints one JSON object: simulated cycles, instructions taken, instructions MCA has no model for, and for every
// processor resource the cycles it was used, all over the whole run. The loop's back branch must not be in the input.
// Built by mca.py against static LLVM libraries; needs LLVM 23.

#include "llvm/MC/MCAsmInfo.h"
#include "llvm/MC/MCContext.h"
#include "llvm/MC/MCInstrAnalysis.h"
#include "llvm/MC/MCInstrInfo.h"
#include "llvm/MC/MCObjectFileInfo.h"
#include "llvm/MC/MCParser/MCAsmParser.h"
#include "llvm/MC/MCParser/MCTargetAsmParser.h"
#include "llvm/MC/MCRegisterInfo.h"
#include "llvm/MC/MCStreamer.h"
#include "llvm/MC/MCSubtargetInfo.h"
#include "llvm/MC/MCTargetOptions.h"
#include "llvm/MC/TargetRegistry.h"
#include "llvm/MCA/Context.h"
#include "llvm/MCA/CustomBehaviour.h"
#include "llvm/MCA/HWEventListener.h"
#include "llvm/MCA/InstrBuilder.h"
#include "llvm/MCA/Pipeline.h"
#include "llvm/MCA/SourceMgr.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/SourceMgr.h"
#include "llvm/Support/raw_ostream.h"
#include <map>

using namespace llvm;

extern "C" {
void LLVMInitializeAMDGPUTargetInfo();
void LLVMInitializeAMDGPUTargetMC();
void LLVMInitializeAMDGPUAsmParser();
void LLVMInitializeAMDGPUTargetMCA();
}

namespace {

// Collects the parsed instructions and ignores everything else.
struct Collector : MCStreamer {
  std::vector<MCInst> instructions;

  explicit Collector(MCContext &context) : MCStreamer(context) {}
  void emitInstruction(const MCInst &inst, const MCSubtargetInfo &) override { instructions.push_back(inst); }
  bool emitSymbolAttribute(MCSymbol *, MCSymbolAttr) override { return true; }
  void emitCommonSymbol(MCSymbol *, uint64_t, Align) override {}
  void emitZerofill(MCSection *, MCSymbol *, uint64_t, Align, SMLoc) override {}
};

// Adds up how long each processor resource is in use.
struct Usage : mca::HWEventListener {
  std::map<std::pair<uint64_t, uint64_t>, double> cycles;

  void onEvent(const mca::HWInstructionEvent &event) override {
    if (event.Type != mca::HWInstructionEvent::Issued)
      return;
    const auto &issued = static_cast<const mca::HWInstructionIssuedEvent &>(event);
    for (const auto &use : issued.UsedResources)
      cycles[use.first] += double(use.second.getNumerator()) / use.second.getDenominator();
  }
};

int fail(const Twine &message) {
  errs() << message << "\n";
  return 1;
}

} // namespace

int main(int argc, char **argv) {
  if (argc != 3)
    return fail("usage: mca_driver CPU ITERATIONS < loop.s");
  const unsigned iterations = atoi(argv[2]);
  LLVMInitializeAMDGPUTargetInfo();
  LLVMInitializeAMDGPUTargetMC();
  LLVMInitializeAMDGPUAsmParser();
  LLVMInitializeAMDGPUTargetMCA();

  // The target's descriptions.
  Triple triple("amdgcn-amd-amdhsa");
  std::string error;
  const Target *target = TargetRegistry::lookupTarget(triple, error);
  if (!target)
    return fail(error);
  MCTargetOptions options;
  std::unique_ptr<MCRegisterInfo> registers(target->createMCRegInfo(triple));
  std::unique_ptr<MCAsmInfo> syntax(target->createMCAsmInfo(*registers, triple, options));
  std::unique_ptr<MCSubtargetInfo> subtarget(target->createMCSubtargetInfo(triple, argv[1], ""));
  std::unique_ptr<MCInstrInfo> info(target->createMCInstrInfo());
  std::unique_ptr<MCInstrAnalysis> analysis(target->createMCInstrAnalysis(info.get()));

  // Parse standard input.
  SourceMgr sources;
  auto input = MemoryBuffer::getSTDIN();
  sources.AddNewSourceBuffer(std::move(*input), SMLoc());
  MCContext context(triple, *syntax, *registers, *subtarget, &sources);
  std::unique_ptr<MCObjectFileInfo> object(target->createMCObjectFileInfo(context, false));
  context.setObjectFileInfo(object.get());
  Collector collector(context);
  std::unique_ptr<MCAsmParser> parser(createMCAsmParser(sources, context, collector, *syntax));
  target->createNullTargetStreamer(collector);
  std::unique_ptr<MCTargetAsmParser> targetParser(target->createMCAsmParser(*subtarget, *parser, *info));
  parser->setTargetParser(*targetParser);
  if (parser->Run(false))
    return fail("the assembly could not be parsed");

  // Give every instruction its scheduling model.
  auto instruments = std::make_unique<mca::InstrumentManager>(*subtarget, *info);
  mca::InstrBuilder builder(*subtarget, *info, *registers, analysis.get(), *instruments, 100);
  std::unique_ptr<mca::InstrPostProcess> post(target->createInstrPostProcess(*subtarget, *info));
  if (!post)
    post = std::make_unique<mca::InstrPostProcess>(*subtarget, *info);
  std::vector<std::unique_ptr<mca::Instruction>> lowered;
  SmallVector<mca::Instrument *> none;
  unsigned skipped = 0;
  for (const MCInst &inst : collector.instructions) {
    auto result = builder.createInstruction(inst, none);
    if (!result) {
      consumeError(result.takeError());
      ++skipped;
      continue;
    }
    post->postProcessInstruction(**result, inst);
    lowered.push_back(std::move(*result));
  }

  // Simulate.
  mca::CircularSourceMgr loop(lowered, iterations);
  std::unique_ptr<mca::CustomBehaviour> behaviour(target->createCustomBehaviour(*subtarget, loop, *info));
  if (!behaviour)
    behaviour = std::make_unique<mca::CustomBehaviour>(*subtarget, loop, *info);
  mca::Context machine(*registers, *subtarget);
  mca::PipelineOptions pipelineOptions(0, 0, 0, 0, 0, 0, true, false);
  const MCSchedModel &model = subtarget->getSchedModel();
  auto pipeline = model.isOutOfOrder() ? machine.createDefaultPipeline(pipelineOptions, loop, *behaviour)
                                       : machine.createInOrderPipeline(pipelineOptions, loop, *behaviour);
  Usage usage;
  pipeline->addEventListener(&usage);
  auto cycles = pipeline->run();
  if (!cycles)
    return fail(toString(cycles.takeError()));

  outs() << "{\"cycles\": " << *cycles << ", \"instructions\": " << lowered.size() << ", \"skipped\": " << skipped
         << ", \"resources\": {";
  const char *separator = "";
  for (const auto &entry : usage.cycles) {
    outs() << separator << "\"" << model.getProcResource(entry.first.first)->Name << "\": " << entry.second;
    separator = ", ";
  }
  outs() << "}}\n";
  return 0;
}
