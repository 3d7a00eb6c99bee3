# crop.sh in out y h
echo "<body style='margin:0;overflow:hidden;height:$4px'><img src='file://$1' style='margin-top:-$3px'></body>" > /tmp/form21/v.html
chromium --headless=new --no-sandbox --disable-gpu --window-size=1280,$4 --screenshot=$2 file:///tmp/form21/v.html >/dev/null 2>&1
