// Every kernel in the folder PAGURO_WGSL_TEXT, through Tint, the compiler of Dawn and Chromium: a second reading of the same WGSL.
//
// Dawn's null backend runs nothing, and has the smallest limits that WebGPU allows, so that no pipelines are made here. Its Vulkan backend
// asks for more than Mesa 22's software driver has.

import assert from 'node:assert';
import fs from 'node:fs';
import path from 'node:path';
import test from 'node:test';
import { create, globals } from 'webgpu';

Object.assign(globalThis, globals);

/** Extensions of naga's that are no WGSL: such kernels are not Tint's to read. */
const EXTENSIONS = { 'coop_mat': 'cooperative matrices', '@coherent': 'coherent and volatile memory' };

test('Tint accepts every kernel', { timeout: 300_000 }, async () => {
  const folder = process.env.PAGURO_WGSL_TEXT;
  const files = fs.readdirSync(folder).filter((name) => name.endsWith('.wgsl')).sort();
  assert(files.length > 50, `${files.length} kernels in ${folder}`);
  const gpu = create(['backend=null', 'enable-dawn-features=allow_unsafe_apis']);
  const adapter = await gpu.requestAdapter();
  const device = await adapter.requestDevice({ requiredFeatures: ['subgroups', 'shader-f16'] });
  const left = new Map();
  const problems = [];
  let accepted = 0;
  for (const file of files) {
    const text = fs.readFileSync(path.join(folder, file), 'utf8');
    const extension = Object.keys(EXTENSIONS).find((word) => text.includes(word));
    if (extension) {
      left.set(EXTENSIONS[extension], (left.get(EXTENSIONS[extension]) ?? 0) + 1);
      continue;
    }
    device.pushErrorScope('validation');
    const module = device.createShaderModule({ code: `enable subgroups;\n${text}` });
    const { messages } = await module.getCompilationInfo();
    await device.popErrorScope();
    const errors = messages.filter((message) => message.type === 'error');
    const lines = text.split('\n');
    problems.push(...errors.map((error) => `${file}: ${error.message}: ${lines[error.lineNum - 2]}`));
    accepted += errors.length === 0 ? 1 : 0;
  }
  for (const [what, count] of left) console.log(`left out, as only naga has ${what}: ${count} kernels`);
  console.log(`${accepted} kernels accepted`);
  device.destroy();
  assert.deepStrictEqual(problems, []);
});
