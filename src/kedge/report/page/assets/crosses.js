// What is not finite, on a chart of uPlot.

// Crosses at values of x, in a row; one that would touch the cross before it is left out.
export function drawCrosses(plot, values, y, reach) {
  const { ctx, bbox } = plot;
  let before = -Infinity;
  ctx.setLineDash([]); // that of the line drawn before would leave gaps in them
  ctx.beginPath();
  for (const value of values) {
    const x = plot.valToPos(value, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width || x - before < 3 * reach) continue;
    before = x;
    ctx.moveTo(x - reach, y - reach);
    ctx.lineTo(x + reach, y + reach);
    ctx.moveTo(x + reach, y - reach);
    ctx.lineTo(x - reach, y + reach);
  }
  ctx.stroke();
}
